// SPDX-License-Identifier: Apache-2.0
// Places in the order of streams, by which memory is handed from one user to the next.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "arch/gpu_runtime.hpp"

namespace switchyard::detail {

/// Everything that was enqueued on a stream until the point was made.
struct StreamPoint {
  gpu::Event event;
  unsigned long long stream_id;
  mutable std::atomic<bool> known_reached = false;  ///< and nobody need ask or wait any more
};
using Point = std::shared_ptr<const StreamPoint>;

struct CaptureState {
  bool active = false;
  unsigned long long id = 0;  ///< of the capture
  gpu::Graph graph = nullptr;
};
/// Whether `stream` is captured now. Leaves the capture alone.
CaptureState capture_of(gpu::Stream stream);

/// Identifies the stream and not its handle: cudaStreamPerThread means another stream in each thread. Not for captured streams.
unsigned long long stream_id(gpu::Stream stream);
/// Identifies a captured stream among the streams of its capture.
inline unsigned long long captured_stream_id(gpu::Stream stream) { return reinterpret_cast<uintptr_t>(stream); }

/// While it lives, calls of this thread that wait or allocate do not spoil a capture that is under way.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  gpu::CaptureMode before_ = gpu::kRelaxedCapture;
};

/// True in this thread while the driver calls back because a graph was destroyed: no CUDA function may be called.
bool in_driver_callback() noexcept;

/// Keeps `object` until the graph and all that is executed of it are destroyed; `release` frees it, and calls no CUDA function.
void retain_in_graph(gpu::Graph graph, void* object, void (*release)(void*));
/// Retains a copy of a smart pointer until the graph ends.
template <class Owner>
void keep_in_graph(const Owner& owner, gpu::Graph graph) {
  retain_in_graph(graph, new Owner(owner), [](void* p) { delete static_cast<Owner*>(p); });
}

/// Makes points on streams of one GPU, of events that are used again. Held by all that hold points, which may outlive the rank.
class StreamPoints : public std::enable_shared_from_this<StreamPoints> {
 public:
  /// What was enqueued on `stream` so far. If that is captured, the point is for its capture only. The GPU is current.
  Point mark(gpu::Stream stream, unsigned long long id);
  /// The same for the place where `point` was, which nobody but the caller holds: it is now, by the same event.
  void move(const StreamPoint& point, gpu::Stream stream);
  /// Destroys the idle events. Points that are still held give theirs up to the context, because their last holder may be a
  /// callback of the driver.
  void close() noexcept;

  /// Whether all of it is done. Neither waits nor touches the pending error of the caller, nor spoils a capture.
  static bool reached(const StreamPoint& point) noexcept;
  /// `stream` goes on after it. Nothing for its own stream.
  static void order(gpu::Stream stream, unsigned long long id, const StreamPoint& point);
  /// This thread waits for it.
  static void wait(const StreamPoint& point);

 private:
  void give(gpu::Event event) noexcept;
  std::mutex mutex_;
  std::vector<gpu::Event> idle_;
  size_t made_ = 0;
  bool closed_ = false;
};

}  // namespace switchyard::detail

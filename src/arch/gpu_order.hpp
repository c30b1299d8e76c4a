// SPDX-License-Identifier: Apache-2.0
// Stream ordering, and objects kept alive by captured graphs: the mechanism by which GPU memory passes from one user to the
// next. Host code for all libraries of the project; each library has a separate instance of the static objects in this file.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "arch/gpu_runtime.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

/// Throws Error(system), naming `what`, unless the runtime reports success.
inline void check_order(gpu::Status status, const char* what) {
  if (status == gpu::kOk) return;
  gpu::forget_error();
  throw Error(ErrorCode::system, std::string(what) + ": " + gpu::text_of(status) + " (" + gpu::name_of(status) + ")");
}

/// Driver functions without a runtime equivalent, looked up once; null if missing from the driver.
struct DriverCalls {
  int (*event_query)(gpu::Event) = nullptr;  ///< the runtime's version leaves "not ready" as the caller's pending error
  int (*current_context)(void** context) = nullptr;
  int (*push_context)(void* context) = nullptr;
  int (*pop_context)(void** context) = nullptr;

  static const DriverCalls& get() {
    static const DriverCalls all = [] {
      DriverCalls found;
      const auto look_up = [](auto* function, const char* name) {
        void* at = nullptr;
        if (gpu::driver_function(&at, name) != gpu::kOk) gpu::forget_error();
        *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(at);
      };
      look_up(&found.event_query, "cuEventQuery");
      look_up(&found.current_context, "cuCtxGetCurrent");
      look_up(&found.push_context, "cuCtxPushCurrent");
      look_up(&found.pop_context, "cuCtxPopCurrent");
      return found;
    }();
    return all;
  }
};

/// Context of this thread's current device; null if there is none.
inline void* current_context() noexcept {
  void* context = nullptr;
  const auto ask = DriverCalls::get().current_context;
  return ask != nullptr && ask(&context) == 0 ? context : nullptr;
}

/// Makes a context current for this thread during its lifetime. Never throws: if the context is missing, subsequent calls fail.
/// (The corresponding pair of runtime calls would create a context on the thread's default device.)
class CurrentContext {
 public:
  explicit CurrentContext(void* context) noexcept
      : pushed_(context != nullptr && context != current_context() && DriverCalls::get().push_context(context) == 0) {}
  ~CurrentContext() {
    void* own = nullptr;
    if (pushed_) DriverCalls::get().pop_context(&own);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const bool pushed_;
};

/// All work enqueued on a stream before the point was created.
struct StreamPoint {
  gpu::Event event;
  unsigned long long stream_id;
  mutable std::atomic<bool> known_reached = false;  ///< no further query or wait is needed
};
using Point = std::shared_ptr<const StreamPoint>;

struct CaptureState {
  bool active = false;
  unsigned long long id = 0;  ///< of the capture
  gpu::Graph graph = nullptr;
};
/// Capture state of `stream`. Does not affect the capture.
inline CaptureState capture_of(gpu::Stream stream) {
  CaptureState state;
  if (gpu::is_legacy(stream)) return state;  // it cannot be captured, and querying it would invalidate captures
  check_order(gpu::capture_info(stream, &state.active, &state.id, &state.graph), "cudaStreamGetCaptureInfo");
  if (!state.active) state.graph = nullptr;
  return state;
}

/// Identifies the stream rather than its handle: cudaStreamPerThread denotes a different stream in each thread. Not for
/// captured streams.
inline unsigned long long stream_id(gpu::Stream stream) {
  unsigned long long id = 0;
  check_order(gpu::id_of(stream, &id), "cudaStreamGetId");
  return id;
}
/// Identifies a captured stream among the streams of its capture.
inline unsigned long long captured_stream_id(gpu::Stream stream) { return reinterpret_cast<uintptr_t>(stream); }

/// During its lifetime, waits and allocations by this thread do not invalidate a capture in progress.
class RelaxedCapture {
 public:
  RelaxedCapture() { check_order(gpu::exchange_capture_mode(&before_), "capture mode"); }
  ~RelaxedCapture() { (void)gpu::exchange_capture_mode(&before_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  gpu::CaptureMode before_ = gpu::kRelaxedCapture;
};

/// True on this thread during the driver callback of a destroyed graph, in which no CUDA function may be called.
inline int& driver_callback_depth() noexcept {
  thread_local int depth = 0;
  return depth;
}
inline bool in_driver_callback() noexcept { return driver_callback_depth() > 0; }

/// Keeps `object` alive until the graph and all its executables are destroyed; `release` frees it and must not call CUDA
/// functions.
inline void retain_in_graph(gpu::Graph graph, void* object, void (*release)(void*)) {
  struct Retained {
    void* object;
    void (*release)(void*);
    static void end(void* given) {
      auto* const retained = static_cast<Retained*>(given);
      ++driver_callback_depth();
      retained->release(retained->object);
      --driver_callback_depth();
      delete retained;
    }
  };
  auto* const retained = new Retained{object, release};
  gpu::GraphObject held = nullptr;
  const gpu::Status status = gpu::make_graph_object(&held, retained, Retained::end);
  if (status != gpu::kOk) Retained::end(retained);
  check_order(status, "cudaUserObjectCreate");
  const gpu::Status kept = gpu::give_to_graph(graph, held);
  if (kept != gpu::kOk) gpu::release_graph_object(held);
  check_order(kept, "cudaGraphRetainUserObject");
}
/// Keeps a copy of a smart pointer until the graph is destroyed.
template <class Owner>
void keep_in_graph(const Owner& owner, gpu::Graph graph) {
  retain_in_graph(graph, new Owner(owner), [](void* p) { delete static_cast<Owner*>(p); });
}

/// Creates points on streams of one GPU, using recycled events. Shared by all holders of points, which may outlive the rank.
class StreamPoints : public std::enable_shared_from_this<StreamPoints> {
 public:
  /// Creates a point after the work enqueued on `stream` so far. If the stream is being captured, the point is valid only in
  /// its capture. The GPU must be current.
  Point mark(gpu::Stream stream, unsigned long long id) {
    gpu::Event event = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        event = idle_.back();
        idle_.pop_back();
      }
    }
    if (event == nullptr) {
      check_order(gpu::make_event(&event), "cudaEventCreate");
      const std::lock_guard lock(mutex_);
      idle_.reserve(++made_);  // so that give() needs no memory
    }
    const Point point(new StreamPoint{event, id}, [points = shared_from_this()](const StreamPoint* p) {
      points->give(p->event);
      delete p;
    });
    check_order(gpu::record_event(event, stream), "cudaEventRecord");
    return point;
  }
  /// Moves `point`, which must have no other holder, to the current end of `stream`, reusing its event.
  void move(const StreamPoint& point, gpu::Stream stream) {
    std::atomic_thread_fence(std::memory_order_acquire);  // earlier holders are done with it
    point.known_reached.store(false, std::memory_order_relaxed);
    check_order(gpu::record_event(point.event, stream), "cudaEventRecord");
  }
  /// Destroys the idle events. Events of points that are still held are left to the context, because the last holder may be a
  /// driver callback.
  void close() noexcept {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (gpu::Event event : idle_) gpu::destroy_event(event);
    idle_.clear();
  }

  /// Returns true if all work before the point has finished. Does not wait, affect the caller's pending error, or invalidate a
  /// capture.
  static bool reached(const StreamPoint& point) noexcept try {
    if (point.known_reached.load(std::memory_order_acquire)) return true;
    const RelaxedCapture relaxed;  // a stream of this thread may be captured
    const auto query = DriverCalls::get().event_query;
    if (query == nullptr || query(point.event) != 0) return false;
    point.known_reached.store(true, std::memory_order_release);
    return true;
  } catch (const Error&) {
    return false;  // unknown counts as not reached
  }
  /// Orders later work on `stream` after the point. Has no effect on the point's own stream.
  static void order(gpu::Stream stream, unsigned long long id, const StreamPoint& point) {
    if (point.stream_id != id) check_order(gpu::order_after(stream, point.event), "cudaStreamWaitEvent");
  }
  /// Blocks this thread until the point is reached.
  static void wait(const StreamPoint& point) { check_order(gpu::wait_for_event(point.event), "wait for the users of rows"); }

 private:
  void give(gpu::Event event) noexcept {
    const std::lock_guard lock(mutex_);
    if (!closed_) idle_.push_back(event);
  }
  std::mutex mutex_;
  std::vector<gpu::Event> idle_;
  size_t made_ = 0;
  bool closed_ = false;
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// GPU memory for expert-compute objects, and reporting of runtime errors.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "arch/gpu_deferred_frees.hpp"
#include "arch/gpu_runtime.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail::gemm {

/// Throws Error(system). `where` is the class name, and `what` is the failed operation.
inline void check_gpu(gpu::Status status, const char* where, const std::string& what) {
  if (status == gpu::kOk) return;
  gpu::forget_error();
  throw Error(ErrorCode::system,
              std::string(where) + ": " + what + ": " + gpu::text_of(status) + " (" + gpu::name_of(status) + ")");
}

/// The stream on which expert-compute objects allocate and free memory on the current device, and markers for the work that
/// uses it. There is one stream per device for the lifetime of the process: the driver maps streams to few hardware queues, and
/// calls from two ranks that share a queue wait for each other.
struct MemoryOrder {
  gpu::Stream stream = nullptr;
  std::shared_ptr<StreamPoints> points = std::make_shared<StreamPoints>();
};
inline const MemoryOrder& memory_order(const char* where) {
  static std::mutex mutex;
  static auto* orders = new std::map<int, MemoryOrder>;  // outlives static objects
  int device = 0;
  check_gpu(gpu::current_device(&device), where, "current GPU");
  const std::lock_guard lock(mutex);
  MemoryOrder& order = (*orders)[device];
  if (order.stream == nullptr) check_gpu(gpu::make_stream(&order.stream), where, "stream");
  return order;
}

/// Zero-initialized memory on the current GPU. Allocated and freed in the order of memory_order(), so that neither operation
/// waits for other work on the GPU. It may be destroyed at any time and on any thread: it is freed after the work on all
/// streams that used it and after the graphs that use it.
class GpuMemory {
 public:
  GpuMemory(const char* where, size_t bytes) : held_(std::make_shared<Held>()) {
    DeferredFrees::of_process().sweep();
    Allocation memory;
    const MemoryOrder& order = memory_order(where);
    held_->points = order.points;
    memory.stream = order.stream;
    gpu::Status status = gpu::allocate_in_order(&memory.data, bytes, memory.stream);
    if (status == gpu::kOk) {
      memory.context = current_context();
      held_->memory = memory;
      status = gpu::fill(memory.data, 0, bytes, memory.stream);
    }
    if (status == gpu::kOk) status = gpu::wait_for_stream(memory.stream);
    check_gpu(status, where, std::to_string(bytes) + " bytes of the GPU's memory");
  }
  /// Shares the memory. Each object has its own users.
  GpuMemory(const GpuMemory& other) : held_(other.held_) {}
  GpuMemory& operator=(const GpuMemory&) = delete;
  /// The streams of this object's users may be destroyed afterwards.
  ~GpuMemory() { held_->take(std::move(users_)); }
  void* data() const { return held_->memory.data; }

  /// Marks the memory as used by work enqueued on `stream` until this object is destroyed; a graph captured on the stream keeps
  /// the memory alive. The GPU must be current.
  void used_on(gpu::Stream stream) {
    const CaptureState capture = capture_of(stream);
    const std::lock_guard lock(mutex_);
    if (!capture.active) return users_.add(stream, *held_->points);
    if (std::exchange(last_capture_, capture.id) != capture.id) keep_in_graph(held_, capture.graph);
  }

 private:
  struct Held {
    Held() = default;
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
      if (!lost_users) DeferredFrees::of_process().defer(memory, MemoryUses(points).on(std::move(users)));
    }
    /// Adds the users of an object that ends, as points where possible.
    void take(StreamUsers given) noexcept try {
      settle(given);
      const std::lock_guard lock(mutex);
      users.add(given);
    } catch (const std::exception&) {
      lost_users = true;
    }
    void settle(StreamUsers& given) const noexcept try {
      if (!given.has_streams() || in_driver_callback()) return;
      const CurrentContext current(memory.context);
      const RelaxedCapture relaxed;  // a stream of this thread may be captured
      given.settle(*points);
    } catch (const std::exception&) {
      // The last owner retries.
    }
    std::shared_ptr<StreamPoints> points;
    Allocation memory;
    std::mutex mutex;
    StreamUsers users;                     ///< of objects that have ended
    std::atomic<bool> lost_users = false;  ///< there was no memory to record some users, so the memory is never freed
  };
  const std::shared_ptr<Held> held_;
  std::mutex mutex_;
  StreamUsers users_;
  unsigned long long last_capture_ = 0;
};

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
// What objects of expert compute have of a GPU's memory, and how they say that the runtime refused something.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>

#include "arch/gpu_runtime.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail::gemm {

/// Throws Error(system). `where` is the class, `what` what was tried.
inline void check_gpu(gpu::Status status, const char* where, const std::string& what) {
  if (status == gpu::kOk) return;
  gpu::forget_error();
  throw Error(ErrorCode::system,
              std::string(where) + ": " + what + ": " + gpu::text_of(status) + " (" + gpu::name_of(status) + ")");
}

/// The stream of the current device in whose order objects of expert compute get their memory. One per device, for the life of
/// the process: the driver maps streams to few hardware queues, and two ranks' calls that share one wait for each other.
inline gpu::Stream memory_stream(const char* where) {
  static std::mutex mutex;
  static auto* streams = new std::map<int, gpu::Stream>;  // outlives static objects
  int device = 0;
  check_gpu(gpu::current_device(&device), where, "current GPU");
  const std::lock_guard lock(mutex);
  gpu::Stream& stream = (*streams)[device];
  if (stream == nullptr) check_gpu(gpu::make_stream(&stream), where, "stream");
  return stream;
}

/// Memory of the current GPU, zero at first. Made and freed in the order of memory_stream(), so that neither waits for what
/// else the GPU does. Nothing may use it when it is destroyed.
class GpuMemory {
 public:
  GpuMemory(const char* where, size_t bytes) : stream_(memory_stream(where)) {
    gpu::Status status = gpu::allocate_in_order(&memory_, bytes, stream_);
    if (status == gpu::kOk) status = gpu::fill(memory_, 0, bytes, stream_);
    if (status == gpu::kOk) status = gpu::wait_for_stream(stream_);
    if (status == gpu::kOk) return;
    release();
    check_gpu(status, where, std::to_string(bytes) + " bytes of the GPU's memory");
  }
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory() { release(); }
  void* data() const { return memory_; }

 private:
  void release() {
    if (memory_ != nullptr) (void)gpu::release_in_order(memory_, stream_);
  }

  gpu::Stream stream_;
  void* memory_ = nullptr;
};

}  // namespace switchyard::detail::gemm

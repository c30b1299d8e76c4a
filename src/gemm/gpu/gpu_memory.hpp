// SPDX-License-Identifier: Apache-2.0
// What objects of expert compute have of a GPU's memory, and how they say that the runtime refused something.
#pragma once

#include <cstddef>
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

/// Memory of the current GPU, zero at first. Made and freed in the order of a stream of its own, so that neither waits for what
/// else the GPU does. Nothing may use it when it is destroyed.
class GpuMemory {
 public:
  GpuMemory(const char* where, size_t bytes) {
    check_gpu(gpu::make_stream(&stream_), where, "stream");
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
    (void)gpu::destroy_stream(stream_);
  }

  gpu::Stream stream_ = nullptr;
  void* memory_ = nullptr;
};

}  // namespace switchyard::detail::gemm

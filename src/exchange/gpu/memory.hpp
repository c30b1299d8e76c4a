// SPDX-License-Identifier: Apache-2.0
// Memory outside the heap that a rank's kernels use: of the GPU, and of the host (end_device.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "arch/gpu_runtime.hpp"

namespace switchyard::detail {

/// Memory of the device that is current when it is made; zero. Its end does not wait for the GPU, whose other groups may wait
/// for ranks that wait for this one: whoever ends it knows that nothing uses it any more. (Without memory pools it waits.)
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// Waits for `stream`, on which it writes the zeros.
  DeviceMemory(size_t bytes, gpu::Stream stream);
  DeviceMemory(DeviceMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), stream_(other.stream_) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~DeviceMemory();
  template <class T>
  T* as(size_t offset = 0) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  std::byte* data_ = nullptr;
  gpu::Stream stream_ = nullptr;  ///< the device's copy stream, if the memory is of the device's pool
};

/// Sets flags in device memory to `word`: at construction, the epoch before the first. Waits for `stream`.
void set_device_flags(void* flags, int64_t bytes, uint64_t word, gpu::Stream stream);

/// Memory whose last user let go of it where no CUDA function may be called, or while graphs may still run. Any thread.
class DeviceGraves {
 public:
  void bury(DeviceMemory memory) {
    const std::lock_guard lock(mutex_);
    buried_.push_back(std::move(memory));
  }
  /// Frees it, with the device current.
  void clear() {
    std::vector<DeviceMemory> buried;
    const std::lock_guard lock(mutex_);
    buried.swap(buried_);
  }

 private:
  std::mutex mutex_;
  std::vector<DeviceMemory> buried_;
};

/// Host memory that is registered with a GPU. Its end waits for all that runs on that GPU, and while it waits no other thread
/// of the process can launch anything there: see end_device.
class SharedHostMemory {
 public:
  SharedHostMemory(int device, std::byte* memory, size_t bytes);
  ~SharedHostMemory();
  SharedHostMemory(const SharedHostMemory&) = delete;
  SharedHostMemory& operator=(const SharedHostMemory&) = delete;
  /// The rank has left: nobody writes it any more. \returns 1 the first time, by which the uses of the process are fewer
  int retire() noexcept { return std::exchange(in_use_, false) ? 1 : 0; }

 private:
  int device_;
  std::byte* memory_;
  bool in_use_ = true;
};

}  // namespace switchyard::detail

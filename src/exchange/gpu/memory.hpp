// SPDX-License-Identifier: Apache-2.0
// Memory outside the heap used by a rank's kernels, on the GPU and on the host (end_device.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "arch/gpu_deferred_frees.hpp"

namespace switchyard::detail {

/// Zeroed memory of the device that is current at construction. Destruction frees it at once, in order with the rank's copies
/// and without waiting (except on devices without memory pools), so it must no longer be in use. Memory still in use is
/// released through end_after().
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// Waits for `stream`, on which the memory is zeroed and which must not be captured; other streams of the thread may be.
  DeviceMemory(size_t bytes, gpu::Stream stream);
  DeviceMemory(DeviceMemory&& other) noexcept : memory_(std::exchange(other.memory_, {})) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~DeviceMemory() {
    if (memory_.data != nullptr) memory_.release();
  }
  /// Frees the memory once `uses` are over. May be called on any thread, including inside a driver callback.
  void end_after(MemoryUses uses) noexcept { DeferredFrees::of_process().defer(std::exchange(memory_, {}), std::move(uses)); }
  void* context() const { return memory_.context; }
  template <class T>
  T* as(size_t offset = 0) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_.data) + offset);
  }

 private:
  Allocation memory_;
};

/// Sets flags in device memory to `word`, which at construction is the epoch before the first one. Waits for `stream`.
void set_device_flags(void* flags, int64_t bytes, uint64_t word, gpu::Stream stream);

/// Host memory that is registered with a GPU. Its destructor waits for all work on that GPU; in the meantime, no other thread
/// of the process can launch anything there (see end_device).
class SharedHostMemory {
 public:
  SharedHostMemory(int device, std::byte* memory, size_t bytes);
  ~SharedHostMemory();
  SharedHostMemory(const SharedHostMemory&) = delete;
  SharedHostMemory& operator=(const SharedHostMemory&) = delete;
  /// The rank has left, so the memory is no longer written. \returns 1 on the first call, else 0: the amount by which the
  /// process's use count drops
  int retire() noexcept { return std::exchange(in_use_, false) ? 1 : 0; }

 private:
  int device_;
  std::byte* memory_;
  bool in_use_ = true;
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

namespace switchyard::detail {

/// Memory of cudaMalloc on the device that is current when it is made; zero.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// Waits for `stream`, on which it writes the zeros.
  DeviceMemory(size_t bytes, cudaStream_t stream);
  DeviceMemory(DeviceMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceMemory();
  template <class T>
  T* as(size_t offset = 0) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  std::byte* data_ = nullptr;
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Implements the backend interface of unit/expert/expert_layer.hpp for GPUs.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>

#include "gpu/harness/object_rig.hpp"

namespace harness {

/// A rank's GPU.
class GpuRig {
 public:
  static constexpr switchyard::Backend kBackend = switchyard::Backend::cuda;
  explicit GpuRig(Station& station) : station_(station) {}
  void* allocate(size_t bytes) { return station_.allocate(std::max<size_t>(bytes, 4)); }
  void write(void* to, const void* from, size_t bytes) {
    if (bytes > 0) must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, station_.stream()), "copy to the device");
    must(cudaStreamSynchronize(station_.stream()), "copy to the device");
  }
  /// A kernel makes the copy, so memory from an object's pool is also supported.
  void read(void* to, const void* from, size_t bytes) {
    const std::byte* const copy = station_.keep(from, bytes, station_.stream());
    must(cudaStreamSynchronize(station_.stream()), "copy on the device");
    station_.read(to, copy, bytes);
  }
  void* stream() const { return station_.stream(); }

 private:
  Station& station_;
};

}  // namespace harness

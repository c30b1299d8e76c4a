// SPDX-License-Identifier: Apache-2.0
#include "layer/gpu/gpu_place.hpp"

#include "arch/gpu_runtime.hpp"
#include "gemm/gpu/gpu_memory.hpp"

namespace switchyard::detail {

GpuPlace current_gpu_place() {
  int device = 0;
  gpu::DeviceTraits traits;
  gemm::check_gpu(gpu::current_device(&device), "MoeLayer", "current GPU");
  gemm::check_gpu(gpu::traits_of(&traits, device), "MoeLayer", "properties of the GPU");
  return {traits.uuid, traits.multiprocessors};
}

}  // namespace switchyard::detail

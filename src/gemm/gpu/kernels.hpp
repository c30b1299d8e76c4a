// SPDX-License-Identifier: Apache-2.0
// The kernels of the grouped GEMM, one file for each type and order of the weights.
#pragma once

#include "arch/gpu_runtime.hpp"
#include "gemm/gpu/grouped_params.hpp"

namespace switchyard::detail::gemm {

/// Treatment of the sums: none; a function of each sum; one output per gate and up element; as gated, quantized to fp8.
enum class Finish : uint8_t { plain, activated, gated, quantised };

/// A kernel, as used by host code.
struct GroupedKernel {
  /// Loads the kernel on the current device and grants it this many bytes of shared memory.
  gpu::Status (*prepare)(int shared_bytes);
  gpu::Status (*launch)(const gpu::Grid& grid, gpu::Stream stream, const GroupedParams& params);
};
template <auto kKernel>
GroupedKernel grouped_kernel_of() {
  return {[](int shared_bytes) { return gpu::allow_shared(kKernel, shared_bytes); },
          [](const gpu::Grid& grid, gpu::Stream stream, const GroupedParams& params) {
            return gpu::launch(kKernel, grid, stream, params);
          }};
}

GroupedKernel kernel_bf16_nk(Finish finish);
GroupedKernel kernel_bf16_kn(Finish finish);
GroupedKernel kernel_f16_nk(Finish finish);
GroupedKernel kernel_f16_kn(Finish finish);
GroupedKernel kernel_fp8(Finish finish);       ///< only fp8 has Finish::quantised
GroupedKernel kernel_fp8_many(Finish finish);  ///< for experts with more than kFewFp8Rows rows; an even number of blocks

}  // namespace switchyard::detail::gemm

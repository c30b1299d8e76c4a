// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM kernels, one file per element type and weight order.
#pragma once

#include "arch/gpu_runtime.hpp"
#include "gemm/gpu/grouped_params.hpp"
#include "switchyard/gemm.hpp"

namespace switchyard::detail::gemm {

/// Final operation on the sums: none, a function of each sum, one output per gate and up element, or gated and quantized to
/// fp8.
enum class Finish : uint8_t { plain, activated, gated, quantised };

/// A kernel as seen by host code.
struct GroupedKernel {
  /// Loads the kernel on the current device and allows it to use this many bytes of shared memory.
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
// fp8; only these have Finish::quantised. The wide kernels are for experts with more than kFewFp8Rows rows and require an even
// number of blocks. `fast`: Accumulate::fast, only with ScaleGranularity::block.
GroupedKernel kernel_fp8(Finish finish);
GroupedKernel kernel_fp8_wide(Finish finish, bool fast);
GroupedKernel kernel_fp8_channel(Finish finish, ScaleGranularity scaling);  ///< per_channel or group_channel
GroupedKernel kernel_fp8_channel_wide(Finish finish, ScaleGranularity scaling);

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
#include "gemm/gpu/grouped_kernel.cuh"
#include "gemm/gpu/kernels.hpp"

namespace switchyard::detail::gemm {

GroupedKernel kernel_f16_kn(Finish finish) { return kernel_of<__half, ptx::OperandOrder::outer>(finish); }

}  // namespace switchyard::detail::gemm

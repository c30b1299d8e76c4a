// SPDX-License-Identifier: Apache-2.0
#include "gemm/gradients/weight_gradient.cuh"

namespace switchyard::detail::gemm {

WeightGradientKernel weight_gradient_bf16(bool wide, bool add) { return weight_gradient_of<__nv_bfloat16>(wide, add); }

}  // namespace switchyard::detail::gemm

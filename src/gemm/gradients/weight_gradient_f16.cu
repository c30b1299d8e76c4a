// SPDX-License-Identifier: Apache-2.0
#include "gemm/gradients/weight_gradient.cuh"

namespace switchyard::detail::gemm {

WeightGradientKernel weight_gradient_f16(bool wide, bool add) { return weight_gradient_of<__half>(wide, add); }

}  // namespace switchyard::detail::gemm

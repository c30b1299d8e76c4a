// SPDX-License-Identifier: Apache-2.0
#include "gemm/gpu/fp8/kernel.cuh"

namespace switchyard::detail::gemm {

GroupedKernel kernel_fp8(Finish finish) {
  switch (finish) {
    case Finish::plain: return grouped_kernel_of<fp8_kernel<Fp8Kind<Finish::plain>>>();
    case Finish::activated: return grouped_kernel_of<fp8_kernel<Fp8Kind<Finish::activated>>>();
    case Finish::gated: return grouped_kernel_of<fp8_kernel<Fp8Kind<Finish::gated>>>();
    case Finish::quantised: break;
  }
  return grouped_kernel_of<fp8_kernel<Fp8Kind<Finish::quantised>>>();
}

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
#include "gemm/gpu/fp8_wide_kernel.cuh"

namespace switchyard::detail::gemm {

GroupedKernel kernel_fp8_wide(Finish finish) {
  switch (finish) {
    case Finish::plain: return grouped_kernel_of<fp8_wide_kernel<WideKind<Finish::plain>>>();
    case Finish::activated: return grouped_kernel_of<fp8_wide_kernel<WideKind<Finish::activated>>>();
    case Finish::gated: return grouped_kernel_of<fp8_wide_kernel<WideKind<Finish::gated>>>();
    case Finish::quantised: break;
  }
  return grouped_kernel_of<fp8_wide_kernel<WideKind<Finish::quantised>>>();
}

}  // namespace switchyard::detail::gemm

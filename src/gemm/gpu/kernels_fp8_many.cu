// SPDX-License-Identifier: Apache-2.0
#include "gemm/gpu/fp8_many_kernel.cuh"

namespace switchyard::detail::gemm {

GroupedKernel kernel_fp8_many(Finish finish) {
  switch (finish) {
    case Finish::plain: return grouped_kernel_of<fp8_many_kernel<ManyKind<Finish::plain>>>();
    case Finish::activated: return grouped_kernel_of<fp8_many_kernel<ManyKind<Finish::activated>>>();
    case Finish::gated: return grouped_kernel_of<fp8_many_kernel<ManyKind<Finish::gated>>>();
    case Finish::quantised: break;
  }
  return grouped_kernel_of<fp8_many_kernel<ManyKind<Finish::quantised>>>();
}

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
#include "gemm/gpu/fp8/wide_kernel.cuh"

namespace switchyard::detail::gemm {

namespace {

template <bool kFast>
GroupedKernel wide_kernel(Finish finish) {
  switch (finish) {
    case Finish::plain: return grouped_kernel_of<fp8_wide_kernel<WideKind<Finish::plain, kFast>>>();
    case Finish::activated: return grouped_kernel_of<fp8_wide_kernel<WideKind<Finish::activated, kFast>>>();
    case Finish::gated: return grouped_kernel_of<fp8_wide_kernel<WideKind<Finish::gated, kFast>>>();
    case Finish::quantised: break;
  }
  return grouped_kernel_of<fp8_wide_kernel<WideKind<Finish::quantised, kFast>>>();
}

}  // namespace

GroupedKernel kernel_fp8_wide(Finish finish, bool fast) {
  return fast ? wide_kernel<true>(finish) : wide_kernel<false>(finish);
}

}  // namespace switchyard::detail::gemm

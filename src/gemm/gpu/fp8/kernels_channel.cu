// SPDX-License-Identifier: Apache-2.0
#include "gemm/gpu/fp8/kernel.cuh"

namespace switchyard::detail::gemm {

namespace {

template <ScaleGranularity kScaling>
GroupedKernel channel_kernel(Finish finish) {
  switch (finish) {
    case Finish::plain: return grouped_kernel_of<fp8_kernel<Fp8Kind<Finish::plain, kScaling>>>();
    case Finish::activated: return grouped_kernel_of<fp8_kernel<Fp8Kind<Finish::activated, kScaling>>>();
    case Finish::gated: return grouped_kernel_of<fp8_kernel<Fp8Kind<Finish::gated, kScaling>>>();
    case Finish::quantised: break;
  }
  return grouped_kernel_of<fp8_kernel<Fp8Kind<Finish::quantised, kScaling>>>();
}

}  // namespace

GroupedKernel kernel_fp8_channel(Finish finish, ScaleGranularity scaling) {
  return scaling == ScaleGranularity::per_channel ? channel_kernel<ScaleGranularity::per_channel>(finish)
                                                  : channel_kernel<ScaleGranularity::group_channel>(finish);
}

}  // namespace switchyard::detail::gemm

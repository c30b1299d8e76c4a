// SPDX-License-Identifier: Apache-2.0
#include "gemm/gpu/fp8_many_kernel.cuh"

namespace switchyard::detail::gemm {
namespace {

template <Finish kFinish>
GroupedKernel kernel_of() {
  constexpr auto kKernel = fp8_many_kernel<ManyKind<kFinish>>;
  return {[](int shared_bytes) { return gpu::allow_shared(kKernel, shared_bytes); },
          [](const gpu::Grid& grid, gpu::Stream stream, const GroupedParams& params) {
            return gpu::launch(kKernel, grid, stream, params);
          }};
}

}  // namespace

GroupedKernel kernel_fp8_many(Finish finish) {
  switch (finish) {
    case Finish::plain: return kernel_of<Finish::plain>();
    case Finish::activated: return kernel_of<Finish::activated>();
    case Finish::gated: return kernel_of<Finish::gated>();
    case Finish::quantised: break;
  }
  return kernel_of<Finish::quantised>();
}

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
#include "gemm/gpu/gpu_gemm.hpp"

namespace switchyard::detail::gemm {

std::unique_ptr<GroupedGemm::Impl> make_grouped_gemm(const GroupedGemmConfig&, const void*) {
  throw Error(ErrorCode::unsupported, "GroupedGemm: this library was built without CUDA");
}

}  // namespace switchyard::detail::gemm

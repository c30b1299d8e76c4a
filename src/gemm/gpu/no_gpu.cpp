// SPDX-License-Identifier: Apache-2.0
// Stubs for experts on a GPU in a library built without CUDA.
#include "gemm/experts.hpp"
#include "gemm/gpu/gpu_gemm.hpp"

namespace switchyard::detail {

ExpertImpl make_gpu_experts(const ExpertShape&, const void*, const void*, const ExpertOptions&) {
  throw Error(ErrorCode::unsupported, "ExpertMlp: this library was built without CUDA");
}

namespace gemm {

std::unique_ptr<GroupedGemm::Impl> make_grouped_gemm(const GroupedGemmConfig&, const void*, const void*) {
  throw Error(ErrorCode::unsupported, "GroupedGemm: this library was built without CUDA");
}

}  // namespace gemm
}  // namespace switchyard::detail

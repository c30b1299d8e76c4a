// SPDX-License-Identifier: Apache-2.0
// Stubs for gradients on a GPU in a library built without CUDA.
#include "gemm/gradients/gpu_gradients.hpp"

namespace switchyard::detail::gemm {
namespace {

[[noreturn]] void refuse(const char* name) {
  throw Error(ErrorCode::unsupported, std::string(name) + ": this library was built without CUDA");
}

}  // namespace

std::unique_ptr<WeightGradient::Impl> make_weight_gradient(const WeightGradientConfig&) { refuse(kWeightGradientObject); }
std::unique_ptr<SwigluGradient::Impl> make_swiglu_gradient(const SwigluGradientConfig&) { refuse(kSwigluGradientObject); }
std::unique_ptr<RoutingGradient::Impl> make_routing_gradient(const RoutingGradientConfig&) { refuse(kRoutingGradientObject); }

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
// C functions for the gradients of an expert MLP.
#include "switchyard/gemm_gradients.hpp"

#include <cstddef>
#include <cstdint>

#include "capi/layer/objects.hpp"
#include "capi/views.hpp"
#include "switchyard/c/gemm_gradients.h"

using namespace switchyard;
using namespace switchyard::detail;

// NOLINTBEGIN(readability-identifier-naming): names of the C ABI
struct sy_weight_gradient {
  WeightGradient gradient;
};
struct sy_swiglu_gradient {
  SwigluGradient gradient;
};
struct sy_routing_gradient {
  RoutingGradient gradient;
};
// NOLINTEND(readability-identifier-naming)

extern "C" {

sy_code sy_weight_gradient_create(const sy_weight_gradient_config* config, sy_weight_gradient** gradient) {
  return make_object("gradient", gradient, [&] { return WeightGradient(from_c(config)); });
}

sy_code sy_weight_gradient_destroy(sy_weight_gradient* gradient) {
  delete gradient;
  return SY_OK;
}

sy_code sy_weight_gradient_run(sy_weight_gradient* gradient, const sy_const_row_view* dy, const sy_const_row_view* x,
                               const sy_expert_rows* rows, void* dw, const sy_grouped_gemm_options* options) {
  return guarded([&] {
    require(gradient, "gradient");
    gradient->gradient.run(from_c(dy, "dy"), from_c(x, "x"), from_c(rows), dw, from_c(options));
  });
}

sy_code sy_swiglu_gradient_create(const sy_swiglu_gradient_config* config, sy_swiglu_gradient** gradient) {
  return make_object("gradient", gradient, [&] { return SwigluGradient(from_c(config)); });
}

sy_code sy_swiglu_gradient_destroy(sy_swiglu_gradient* gradient) {
  delete gradient;
  return SY_OK;
}

sy_code sy_swiglu_gradient_run(sy_swiglu_gradient* gradient, const sy_const_row_view* h, const sy_const_row_view* da,
                               const sy_expert_rows* rows, const sy_row_view* dh, const sy_row_view* a,
                               const sy_grouped_gemm_options* options) {
  return guarded([&] {
    require(gradient, "gradient");
    gradient->gradient.run(from_c(h, "h"), from_c(da, "da"), from_c(rows), from_c(dh, "dh"), a ? from_c(a, "a") : Rows{},
                           from_c(options));
  });
}

sy_code sy_routing_gradient_create(const sy_routing_gradient_config* config, sy_routing_gradient** gradient) {
  return make_object("gradient", gradient, [&] { return RoutingGradient(from_c(config)); });
}

sy_code sy_routing_gradient_destroy(sy_routing_gradient* gradient) {
  delete gradient;
  return SY_OK;
}

sy_code sy_routing_gradient_run(sy_routing_gradient* gradient, const sy_const_row_view* dy, const sy_const_row_view* y,
                                const sy_expert_rows* rows, float* dweight, const sy_grouped_gemm_options* options) {
  return guarded([&] {
    require(gradient, "gradient");
    gradient->gradient.run(from_c(dy, "dy"), from_c(y, "y"), from_c(rows), dweight, from_c(options));
  });
}

}  // extern "C"

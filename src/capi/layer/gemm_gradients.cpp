// SPDX-License-Identifier: Apache-2.0
// C functions of the gradients of an expert MLP.
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

namespace switchyard::detail {

template <>
inline constexpr bool kHasNoPadding<sy_swiglu_gradient_config> = sizeof(sy_swiglu_gradient_config) ==
                                                                 sizeof(size_t) + sizeof(int64_t) + 3 * sizeof(int32_t) +
                                                                     3 * sizeof(float);

}  // namespace switchyard::detail

namespace {

constexpr sy_weight_gradient_config kWeight = SY_WEIGHT_GRADIENT_CONFIG_INIT;
constexpr sy_swiglu_gradient_config kSwiglu = SY_SWIGLU_GRADIENT_CONFIG_INIT;
constexpr sy_routing_gradient_config kRouting = SY_ROUTING_GRADIENT_CONFIG_INIT;

// The macros must match the C++ defaults. Members keep their offsets forever: new ones are appended.
static_assert(kWeight.type == static_cast<int>(WeightGradientConfig{}.type) &&
              kWeight.output == static_cast<int>(WeightGradientConfig{}.output) &&
              kWeight.add == static_cast<int>(WeightGradientConfig{}.add));
static_assert(kSwiglu.type == static_cast<int>(SwigluGradientConfig{}.type) && kSwiglu.swiglu_limit == Swiglu{}.limit &&
              kSwiglu.swiglu_alpha == Swiglu{}.alpha && kSwiglu.swiglu_up_shift == Swiglu{}.up_shift);
static_assert(kRouting.type == static_cast<int>(RoutingGradientConfig{}.type));
static_assert(offsetof(sy_weight_gradient_config, num_experts) == 24 && sizeof(sy_weight_gradient_config) == 40);
static_assert(offsetof(sy_swiglu_gradient_config, swiglu_limit) == 24 && sizeof(sy_swiglu_gradient_config) == 40);
static_assert(offsetof(sy_routing_gradient_config, num_experts) == 16 && sizeof(sy_routing_gradient_config) == 24);

WeightGradientConfig to_config(const sy_weight_gradient_config* config) {
  const sy_weight_gradient_config c = read_struct(config, kWeight, "config");
  return {.num_experts = c.num_experts,
          .n = c.n,
          .k = c.k,
          .type = to_enum<DType>("config->dtype", c.type),
          .output = to_enum<DType>("config->output", c.output),
          .add = to_bool("config->add", c.add)};
}

SwigluGradientConfig to_config(const sy_swiglu_gradient_config* config) {
  const sy_swiglu_gradient_config c = read_struct(config, kSwiglu, "config");
  require_range("config->reserved", c.reserved, 0, 0);
  return {.num_experts = c.num_experts,
          .columns = c.columns,
          .type = to_enum<DType>("config->dtype", c.type),
          .swiglu = {c.swiglu_limit, c.swiglu_alpha, c.swiglu_up_shift}};
}

RoutingGradientConfig to_config(const sy_routing_gradient_config* config) {
  const sy_routing_gradient_config c = read_struct(config, kRouting, "config");
  return {.num_experts = c.num_experts, .columns = c.columns, .type = to_enum<DType>("config->dtype", c.type)};
}

}  // namespace

extern "C" {

sy_code sy_weight_gradient_create(const sy_weight_gradient_config* config, sy_weight_gradient** gradient) {
  return make_object("gradient", gradient, [&] { return WeightGradient(to_config(config)); });
}

sy_code sy_weight_gradient_destroy(sy_weight_gradient* gradient) {
  delete gradient;
  return SY_OK;
}

sy_code sy_weight_gradient_run(sy_weight_gradient* gradient, const sy_const_row_view* dy, const sy_const_row_view* x,
                                         const sy_expert_rows* rows, void* dw, const sy_grouped_gemm_options* options) {
  return guarded([&] {
    require(gradient, "gradient");
    gradient->gradient.run(to_rows(dy, "dy"), to_rows(x, "x"), to_expert_rows(rows), dw, to_gemm_options(options));
  });
}

sy_code sy_swiglu_gradient_create(const sy_swiglu_gradient_config* config, sy_swiglu_gradient** gradient) {
  return make_object("gradient", gradient, [&] { return SwigluGradient(to_config(config)); });
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
    gradient->gradient.run(to_rows(h, "h"), to_rows(da, "da"), to_expert_rows(rows), to_rows(dh, "dh"),
                           a ? to_rows(a, "a") : Rows{}, to_gemm_options(options));
  });
}

sy_code sy_routing_gradient_create(const sy_routing_gradient_config* config, sy_routing_gradient** gradient) {
  return make_object("gradient", gradient, [&] { return RoutingGradient(to_config(config)); });
}

sy_code sy_routing_gradient_destroy(sy_routing_gradient* gradient) {
  delete gradient;
  return SY_OK;
}

sy_code sy_routing_gradient_run(sy_routing_gradient* gradient, const sy_const_row_view* dy,
                                          const sy_const_row_view* y, const sy_expert_rows* rows, float* dweight,
                                          const sy_grouped_gemm_options* options) {
  return guarded([&] {
    require(gradient, "gradient");
    gradient->gradient.run(to_rows(dy, "dy"), to_rows(y, "y"), to_expert_rows(rows), dweight, to_gemm_options(options));
  });
}

}  // extern "C"

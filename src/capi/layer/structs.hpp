// SPDX-License-Identifier: Apache-2.0
// Generated from include/switchyard/c by scripts/interface/generate.py; change the headers and run it.
// Structs of libswitchyard_layer and their C++ counterparts; capi/structs.hpp has those of libswitchyard.
#pragma once

// clang-format off
#include <cstddef>
#include <cstdint>
#include "capi/structs.hpp"
#include "switchyard/c/gemm_gradients.h"
#include "switchyard/c/layer.h"
#include "switchyard/gemm_gradients.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::detail {

// Values of the enumerations.
static_assert(SY_WEIGHTS_PACKED == static_cast<int>(WeightStorage::packed) &&
              SY_WEIGHTS_VIEW == static_cast<int>(WeightStorage::view));
static_assert(SY_WEIGHTS_NK == static_cast<int>(WeightOrder::nk) && SY_WEIGHTS_KN == static_cast<int>(WeightOrder::kn));
static_assert(SY_EPILOGUE_NONE == static_cast<int>(Epilogue::none) && SY_EPILOGUE_RELU == static_cast<int>(Epilogue::relu) &&
              SY_EPILOGUE_SILU == static_cast<int>(Epilogue::silu) &&
              SY_EPILOGUE_SWIGLU == static_cast<int>(Epilogue::swiglu));
static_assert(SY_GRANULARITY_BLOCK == static_cast<int>(ScaleGranularity::block) &&
              SY_GRANULARITY_PER_CHANNEL == static_cast<int>(ScaleGranularity::per_channel) &&
              SY_GRANULARITY_GROUP_CHANNEL == static_cast<int>(ScaleGranularity::group_channel));
static_assert(SY_OUTPUT_PER_GROUP == static_cast<int>(OutputScaling::per_group) &&
              SY_OUTPUT_FIXED == static_cast<int>(OutputScaling::fixed) &&
              SY_OUTPUT_PER_ROW == static_cast<int>(OutputScaling::per_row));
static_assert(SY_MOE_EXCHANGE_AUTOMATIC == static_cast<int>(MoeExchange::automatic) &&
              SY_MOE_EXCHANGE_NORMAL == static_cast<int>(MoeExchange::normal) &&
              SY_MOE_EXCHANGE_LOW_LATENCY == static_cast<int>(MoeExchange::low_latency));
static_assert(SY_MOE_FORM_AUTOMATIC == static_cast<int>(MoeForm::automatic) &&
              SY_MOE_FORM_SEPARATE == static_cast<int>(MoeForm::separate) &&
              SY_MOE_FORM_FUSED == static_cast<int>(MoeForm::fused));

// Members never move; new members are appended. No struct has padding, so every byte belongs to a member.
static_assert(sizeof(sy_expert_shape) == 32 && offsetof(sy_expert_shape, hidden) == 8 &&
              offsetof(sy_expert_shape, intermediate) == 16 && offsetof(sy_expert_shape, num_local_experts) == 24 &&
              offsetof(sy_expert_shape, reserved) == 28);
static_assert(sizeof(sy_expert_options) == 80 && offsetof(sy_expert_options, backend) == 8 &&
              offsetof(sy_expert_options, dtype) == 12 && offsetof(sy_expert_options, storage) == 16 &&
              offsetof(sy_expert_options, reserved) == 20 && offsetof(sy_expert_options, route_scratch_bytes) == 24 &&
              offsetof(sy_expert_options, max_rows) == 32 && offsetof(sy_expert_options, w13_scales) == 40 &&
              offsetof(sy_expert_options, w2_scales) == 48 && offsetof(sy_expert_options, weight_scales) == 56 &&
              offsetof(sy_expert_options, accumulate) == 60 && offsetof(sy_expert_options, scaling) == 64 &&
              offsetof(sy_expert_options, intermediate_scaling) == 68 &&
              offsetof(sy_expert_options, intermediate_scale) == 72);
static_assert(sizeof(sy_expert_memory) == 32 && offsetof(sy_expert_memory, weight_bytes) == 8 &&
              offsetof(sy_expert_memory, scratch_bytes) == 16 && offsetof(sy_expert_memory, total_bytes) == 24);
static_assert(sizeof(sy_expert_call) == 24 && offsetof(sy_expert_call, stream) == 8 &&
              offsetof(sy_expert_call, num_sms) == 16 && offsetof(sy_expert_call, reserved) == 20);
static_assert(sizeof(sy_grouped_gemm_config) == 72 && offsetof(sy_grouped_gemm_config, n) == 8 &&
              offsetof(sy_grouped_gemm_config, k) == 16 && offsetof(sy_grouped_gemm_config, num_experts) == 24 &&
              offsetof(sy_grouped_gemm_config, dtype) == 28 && offsetof(sy_grouped_gemm_config, order) == 32 &&
              offsetof(sy_grouped_gemm_config, epilogue) == 36 && offsetof(sy_grouped_gemm_config, swiglu_limit) == 40 &&
              offsetof(sy_grouped_gemm_config, swiglu_alpha) == 44 &&
              offsetof(sy_grouped_gemm_config, swiglu_up_shift) == 48 &&
              offsetof(sy_grouped_gemm_config, weight_scales) == 52 && offsetof(sy_grouped_gemm_config, quantize) == 56 &&
              offsetof(sy_grouped_gemm_config, accumulate) == 60 && offsetof(sy_grouped_gemm_config, scaling) == 64 &&
              offsetof(sy_grouped_gemm_config, output_scaling) == 68);
static_assert(sizeof(sy_expert_rows) == 56 && offsetof(sy_expert_rows, num_rows) == 8 &&
              offsetof(sy_expert_rows, num_rows_32) == 16 && offsetof(sy_expert_rows, first_row) == 24 &&
              offsetof(sy_expert_rows, rows_per_expert) == 32 && offsetof(sy_expert_rows, scale_rows) == 40 &&
              offsetof(sy_expert_rows, scale_stride) == 48);
static_assert(sizeof(sy_grouped_gemm_options) == 40 && offsetof(sy_grouped_gemm_options, stream) == 8 &&
              offsetof(sy_grouped_gemm_options, num_sms) == 16 && offsetof(sy_grouped_gemm_options, reserved) == 20 &&
              offsetof(sy_grouped_gemm_options, output_scale) == 24 && offsetof(sy_grouped_gemm_options, scratch) == 32);
static_assert(sizeof(sy_weight_gradient_config) == 40 && offsetof(sy_weight_gradient_config, n) == 8 &&
              offsetof(sy_weight_gradient_config, k) == 16 && offsetof(sy_weight_gradient_config, num_experts) == 24 &&
              offsetof(sy_weight_gradient_config, dtype) == 28 && offsetof(sy_weight_gradient_config, out_dtype) == 32 &&
              offsetof(sy_weight_gradient_config, add) == 36);
static_assert(sizeof(sy_swiglu_gradient_config) == 40 && offsetof(sy_swiglu_gradient_config, columns) == 8 &&
              offsetof(sy_swiglu_gradient_config, num_experts) == 16 && offsetof(sy_swiglu_gradient_config, dtype) == 20 &&
              offsetof(sy_swiglu_gradient_config, swiglu_limit) == 24 &&
              offsetof(sy_swiglu_gradient_config, swiglu_alpha) == 28 &&
              offsetof(sy_swiglu_gradient_config, swiglu_up_shift) == 32 &&
              offsetof(sy_swiglu_gradient_config, reserved) == 36);
static_assert(sizeof(sy_routing_gradient_config) == 24 && offsetof(sy_routing_gradient_config, columns) == 8 &&
              offsetof(sy_routing_gradient_config, num_experts) == 16 && offsetof(sy_routing_gradient_config, dtype) == 20);
static_assert(sizeof(sy_moe_layer_config) == 128 && offsetof(sy_moe_layer_config, hidden) == 8 &&
              offsetof(sy_moe_layer_config, intermediate) == 16 && offsetof(sy_moe_layer_config, max_tokens) == 24 &&
              offsetof(sy_moe_layer_config, capacity) == 32 && offsetof(sy_moe_layer_config, num_experts) == 40 &&
              offsetof(sy_moe_layer_config, topk) == 44 && offsetof(sy_moe_layer_config, dtype) == 48 &&
              offsetof(sy_moe_layer_config, order) == 52 && offsetof(sy_moe_layer_config, exchange) == 56 &&
              offsetof(sy_moe_layer_config, form) == 60 && offsetof(sy_moe_layer_config, overflow) == 64 &&
              offsetof(sy_moe_layer_config, captured) == 68 && offsetof(sy_moe_layer_config, storage) == 72 &&
              offsetof(sy_moe_layer_config, row_scales) == 76 && offsetof(sy_moe_layer_config, weight_scales) == 80 &&
              offsetof(sy_moe_layer_config, invalid_ids) == 84 && offsetof(sy_moe_layer_config, w13_scales) == 88 &&
              offsetof(sy_moe_layer_config, w2_scales) == 96 && offsetof(sy_moe_layer_config, accumulate) == 104 &&
              offsetof(sy_moe_layer_config, scaling) == 108 && offsetof(sy_moe_layer_config, intermediate_scaling) == 112 &&
              offsetof(sy_moe_layer_config, reserved) == 116 && offsetof(sy_moe_layer_config, intermediate_scale) == 120);
static_assert(sizeof(sy_moe_layer_memory) == 48 && offsetof(sy_moe_layer_memory, heap_bytes) == 8 &&
              offsetof(sy_moe_layer_memory, private_bytes) == 16 && offsetof(sy_moe_layer_memory, weight_bytes) == 24 &&
              offsetof(sy_moe_layer_memory, scratch_bytes) == 32 && offsetof(sy_moe_layer_memory, total_bytes) == 40);
static_assert(sizeof(sy_moe_layer_call) == 56 && offsetof(sy_moe_layer_call, stream) == 8 &&
              offsetof(sy_moe_layer_call, device_tokens) == 16 && offsetof(sy_moe_layer_call, num_sms) == 24 &&
              offsetof(sy_moe_layer_call, add) == 28 && offsetof(sy_moe_layer_call, known_memory) == 32 &&
              offsetof(sy_moe_layer_call, reserved) == 36 && offsetof(sy_moe_layer_call, selector) == 40 &&
              offsetof(sy_moe_layer_call, weights_ready) == 48);

// sy_expert_shape
template <>
inline constexpr sy_expert_shape kInit<sy_expert_shape> = SY_EXPERT_SHAPE_INIT;
static_assert(kInit<sy_expert_shape>.hidden == ExpertShape{}.hidden &&
              kInit<sy_expert_shape>.intermediate == ExpertShape{}.intermediate &&
              kInit<sy_expert_shape>.num_local_experts == ExpertShape{}.num_local_experts);
inline ExpertShape twin_of(const sy_expert_shape& c, [[maybe_unused]] const char* name) {
  ExpertShape twin;
  twin.hidden = c.hidden;
  twin.intermediate = c.intermediate;
  twin.num_local_experts = c.num_local_experts;
  require_range_of(name, "reserved", c.reserved, 0, 0);
  return twin;
}
inline ExpertShape from_c(const sy_expert_shape* given, const char* name = "shape") {
  return twin_of(read_struct(given, kInit<sy_expert_shape>, name), name);
}

// sy_expert_options
template <>
inline constexpr sy_expert_options kInit<sy_expert_options> = SY_EXPERT_OPTIONS_INIT;
static_assert(kInit<sy_expert_options>.backend == static_cast<int>(ExpertOptions{}.backend) &&
              kInit<sy_expert_options>.dtype == static_cast<int>(ExpertOptions{}.dtype) &&
              kInit<sy_expert_options>.storage == static_cast<int>(ExpertOptions{}.storage) &&
              kInit<sy_expert_options>.route_scratch_bytes == ExpertOptions{}.route_scratch_bytes &&
              kInit<sy_expert_options>.max_rows == ExpertOptions{}.max_rows &&
              kInit<sy_expert_options>.w13_scales == ExpertOptions{}.w13_scales &&
              kInit<sy_expert_options>.w2_scales == ExpertOptions{}.w2_scales &&
              kInit<sy_expert_options>.weight_scales == static_cast<int>(ExpertOptions{}.weight_scales) &&
              kInit<sy_expert_options>.accumulate == static_cast<int>(ExpertOptions{}.accumulate) &&
              kInit<sy_expert_options>.scaling == static_cast<int>(ExpertOptions{}.scaling) &&
              kInit<sy_expert_options>.intermediate_scaling == static_cast<int>(ExpertOptions{}.intermediate_scaling) &&
              kInit<sy_expert_options>.intermediate_scale == ExpertOptions{}.intermediate_scale);
inline ExpertOptions twin_of(const sy_expert_options& c, [[maybe_unused]] const char* name) {
  ExpertOptions twin;
  twin.backend = to_enum_of<Backend>(name, "backend", c.backend);
  twin.dtype = to_enum_of<DType>(name, "dtype", c.dtype);
  twin.storage = to_enum_of<WeightStorage>(name, "storage", c.storage);
  require_range_of(name, "reserved", c.reserved, 0, 0);
  twin.route_scratch_bytes = c.route_scratch_bytes;
  twin.max_rows = c.max_rows;
  twin.w13_scales = c.w13_scales;
  twin.w2_scales = c.w2_scales;
  twin.weight_scales = to_enum_of<ScaleKind>(name, "weight_scales", c.weight_scales);
  twin.accumulate = to_enum_of<Accumulate>(name, "accumulate", c.accumulate);
  twin.scaling = to_enum_of<ScaleGranularity>(name, "scaling", c.scaling);
  twin.intermediate_scaling = to_enum_of<OutputScaling>(name, "intermediate_scaling", c.intermediate_scaling);
  twin.intermediate_scale = c.intermediate_scale;
  return twin;
}
inline ExpertOptions from_c(const sy_expert_options* given, const char* name = "options") {
  if (!given) return {};
  return twin_of(read_struct(given, kInit<sy_expert_options>, name), name);
}

// sy_expert_memory
inline void fill(sy_expert_memory* to, const ExpertMemory& from) {
  write_struct(to, sy_expert_memory{sizeof(sy_expert_memory), from.weight_bytes, from.scratch_bytes, from.total()});
}

// sy_expert_call
template <>
inline constexpr sy_expert_call kInit<sy_expert_call> = SY_EXPERT_CALL_INIT;
static_assert(kInit<sy_expert_call>.stream == ExpertCall{}.stream && kInit<sy_expert_call>.num_sms == ExpertCall{}.num_sms);
inline ExpertCall twin_of(const sy_expert_call& c, [[maybe_unused]] const char* name) {
  ExpertCall twin;
  twin.stream = c.stream;
  twin.num_sms = c.num_sms;
  require_range_of(name, "reserved", c.reserved, 0, 0);
  return twin;
}
inline ExpertCall from_c(const sy_expert_call* given, const char* name = "call") {
  if (!given) return {};
  return twin_of(read_struct(given, kInit<sy_expert_call>, name), name);
}

// sy_grouped_gemm_config
template <>
inline constexpr sy_grouped_gemm_config kInit<sy_grouped_gemm_config> = SY_GROUPED_GEMM_CONFIG_INIT;
static_assert(kInit<sy_grouped_gemm_config>.n == GroupedGemmConfig{}.n &&
              kInit<sy_grouped_gemm_config>.k == GroupedGemmConfig{}.k &&
              kInit<sy_grouped_gemm_config>.num_experts == GroupedGemmConfig{}.num_experts &&
              kInit<sy_grouped_gemm_config>.dtype == static_cast<int>(GroupedGemmConfig{}.dtype) &&
              kInit<sy_grouped_gemm_config>.order == static_cast<int>(GroupedGemmConfig{}.order) &&
              kInit<sy_grouped_gemm_config>.epilogue == static_cast<int>(GroupedGemmConfig{}.epilogue) &&
              kInit<sy_grouped_gemm_config>.swiglu_limit == GroupedGemmConfig{}.swiglu.limit &&
              kInit<sy_grouped_gemm_config>.swiglu_alpha == GroupedGemmConfig{}.swiglu.alpha &&
              kInit<sy_grouped_gemm_config>.swiglu_up_shift == GroupedGemmConfig{}.swiglu.up_shift &&
              kInit<sy_grouped_gemm_config>.weight_scales == static_cast<int>(GroupedGemmConfig{}.weight_scales) &&
              kInit<sy_grouped_gemm_config>.quantize == static_cast<int>(GroupedGemmConfig{}.quantize) &&
              kInit<sy_grouped_gemm_config>.accumulate == static_cast<int>(GroupedGemmConfig{}.accumulate) &&
              kInit<sy_grouped_gemm_config>.scaling == static_cast<int>(GroupedGemmConfig{}.scaling) &&
              kInit<sy_grouped_gemm_config>.output_scaling == static_cast<int>(GroupedGemmConfig{}.output_scaling));
inline GroupedGemmConfig twin_of(const sy_grouped_gemm_config& c, [[maybe_unused]] const char* name) {
  GroupedGemmConfig twin;
  twin.n = c.n;
  twin.k = c.k;
  twin.num_experts = c.num_experts;
  twin.dtype = to_enum_of<DType>(name, "dtype", c.dtype);
  twin.order = to_enum_of<WeightOrder>(name, "order", c.order);
  twin.epilogue = to_enum_of<Epilogue>(name, "epilogue", c.epilogue);
  twin.swiglu.limit = c.swiglu_limit;
  twin.swiglu.alpha = c.swiglu_alpha;
  twin.swiglu.up_shift = c.swiglu_up_shift;
  twin.weight_scales = to_enum_of<ScaleKind>(name, "weight_scales", c.weight_scales);
  twin.quantize = to_enum_of<ScaleKind>(name, "quantize", c.quantize);
  twin.accumulate = to_enum_of<Accumulate>(name, "accumulate", c.accumulate);
  twin.scaling = to_enum_of<ScaleGranularity>(name, "scaling", c.scaling);
  twin.output_scaling = to_enum_of<OutputScaling>(name, "output_scaling", c.output_scaling);
  return twin;
}
inline GroupedGemmConfig from_c(const sy_grouped_gemm_config* given, const char* name = "config") {
  return twin_of(read_struct(given, kInit<sy_grouped_gemm_config>, name), name);
}

// sy_expert_rows
template <>
inline constexpr sy_expert_rows kInit<sy_expert_rows> = SY_EXPERT_ROWS_INIT;
static_assert(kInit<sy_expert_rows>.num_rows == ExpertRows{}.num_rows &&
              kInit<sy_expert_rows>.num_rows_32 == ExpertRows{}.num_rows_32 &&
              kInit<sy_expert_rows>.first_row == ExpertRows{}.first_row &&
              kInit<sy_expert_rows>.rows_per_expert == ExpertRows{}.rows_per_expert &&
              kInit<sy_expert_rows>.scale_rows == ExpertRows{}.scale_rows &&
              kInit<sy_expert_rows>.scale_stride == ExpertRows{}.scale_stride);
inline ExpertRows twin_of(const sy_expert_rows& c, [[maybe_unused]] const char* name) {
  ExpertRows twin;
  twin.num_rows = c.num_rows;
  twin.num_rows_32 = c.num_rows_32;
  twin.first_row = c.first_row;
  twin.rows_per_expert = c.rows_per_expert;
  twin.scale_rows = c.scale_rows;
  twin.scale_stride = c.scale_stride;
  return twin;
}
inline ExpertRows from_c(const sy_expert_rows* given, const char* name = "rows") {
  return twin_of(read_struct(given, kInit<sy_expert_rows>, name), name);
}
inline void fill(sy_expert_rows* to, const ExpertRows& from) {
  write_struct(to, sy_expert_rows{sizeof(sy_expert_rows), from.num_rows, from.num_rows_32, from.first_row, from.rows_per_expert,
                    from.scale_rows, from.scale_stride});
}

// sy_grouped_gemm_options
template <>
inline constexpr sy_grouped_gemm_options kInit<sy_grouped_gemm_options> = SY_GROUPED_GEMM_OPTIONS_INIT;
static_assert(kInit<sy_grouped_gemm_options>.stream == GroupedGemmOptions{}.stream &&
              kInit<sy_grouped_gemm_options>.num_sms == GroupedGemmOptions{}.num_sms &&
              kInit<sy_grouped_gemm_options>.output_scale == GroupedGemmOptions{}.output_scale &&
              kInit<sy_grouped_gemm_options>.scratch == GroupedGemmOptions{}.scratch);
inline GroupedGemmOptions twin_of(const sy_grouped_gemm_options& c, [[maybe_unused]] const char* name) {
  GroupedGemmOptions twin;
  twin.stream = c.stream;
  twin.num_sms = c.num_sms;
  require_range_of(name, "reserved", c.reserved, 0, 0);
  twin.output_scale = c.output_scale;
  twin.scratch = c.scratch;
  return twin;
}
inline GroupedGemmOptions from_c(const sy_grouped_gemm_options* given, const char* name = "options") {
  if (!given) return {};
  return twin_of(read_struct(given, kInit<sy_grouped_gemm_options>, name), name);
}

// sy_weight_gradient_config
template <>
inline constexpr sy_weight_gradient_config kInit<sy_weight_gradient_config> = SY_WEIGHT_GRADIENT_CONFIG_INIT;
static_assert(kInit<sy_weight_gradient_config>.n == WeightGradientConfig{}.n &&
              kInit<sy_weight_gradient_config>.k == WeightGradientConfig{}.k &&
              kInit<sy_weight_gradient_config>.num_experts == WeightGradientConfig{}.num_experts &&
              kInit<sy_weight_gradient_config>.dtype == static_cast<int>(WeightGradientConfig{}.dtype) &&
              kInit<sy_weight_gradient_config>.out_dtype == static_cast<int>(WeightGradientConfig{}.out_dtype) &&
              kInit<sy_weight_gradient_config>.add == static_cast<int>(WeightGradientConfig{}.add));
inline WeightGradientConfig twin_of(const sy_weight_gradient_config& c, [[maybe_unused]] const char* name) {
  WeightGradientConfig twin;
  twin.n = c.n;
  twin.k = c.k;
  twin.num_experts = c.num_experts;
  twin.dtype = to_enum_of<DType>(name, "dtype", c.dtype);
  twin.out_dtype = to_enum_of<DType>(name, "out_dtype", c.out_dtype);
  twin.add = to_bool_of(name, "add", c.add);
  return twin;
}
inline WeightGradientConfig from_c(const sy_weight_gradient_config* given, const char* name = "config") {
  return twin_of(read_struct(given, kInit<sy_weight_gradient_config>, name), name);
}

// sy_swiglu_gradient_config
template <>
inline constexpr sy_swiglu_gradient_config kInit<sy_swiglu_gradient_config> = SY_SWIGLU_GRADIENT_CONFIG_INIT;
static_assert(kInit<sy_swiglu_gradient_config>.columns == SwigluGradientConfig{}.columns &&
              kInit<sy_swiglu_gradient_config>.num_experts == SwigluGradientConfig{}.num_experts &&
              kInit<sy_swiglu_gradient_config>.dtype == static_cast<int>(SwigluGradientConfig{}.dtype) &&
              kInit<sy_swiglu_gradient_config>.swiglu_limit == SwigluGradientConfig{}.swiglu.limit &&
              kInit<sy_swiglu_gradient_config>.swiglu_alpha == SwigluGradientConfig{}.swiglu.alpha &&
              kInit<sy_swiglu_gradient_config>.swiglu_up_shift == SwigluGradientConfig{}.swiglu.up_shift);
inline SwigluGradientConfig twin_of(const sy_swiglu_gradient_config& c, [[maybe_unused]] const char* name) {
  SwigluGradientConfig twin;
  twin.columns = c.columns;
  twin.num_experts = c.num_experts;
  twin.dtype = to_enum_of<DType>(name, "dtype", c.dtype);
  twin.swiglu.limit = c.swiglu_limit;
  twin.swiglu.alpha = c.swiglu_alpha;
  twin.swiglu.up_shift = c.swiglu_up_shift;
  require_range_of(name, "reserved", c.reserved, 0, 0);
  return twin;
}
inline SwigluGradientConfig from_c(const sy_swiglu_gradient_config* given, const char* name = "config") {
  return twin_of(read_struct(given, kInit<sy_swiglu_gradient_config>, name), name);
}

// sy_routing_gradient_config
template <>
inline constexpr sy_routing_gradient_config kInit<sy_routing_gradient_config> = SY_ROUTING_GRADIENT_CONFIG_INIT;
static_assert(kInit<sy_routing_gradient_config>.columns == RoutingGradientConfig{}.columns &&
              kInit<sy_routing_gradient_config>.num_experts == RoutingGradientConfig{}.num_experts &&
              kInit<sy_routing_gradient_config>.dtype == static_cast<int>(RoutingGradientConfig{}.dtype));
inline RoutingGradientConfig twin_of(const sy_routing_gradient_config& c, [[maybe_unused]] const char* name) {
  RoutingGradientConfig twin;
  twin.columns = c.columns;
  twin.num_experts = c.num_experts;
  twin.dtype = to_enum_of<DType>(name, "dtype", c.dtype);
  return twin;
}
inline RoutingGradientConfig from_c(const sy_routing_gradient_config* given, const char* name = "config") {
  return twin_of(read_struct(given, kInit<sy_routing_gradient_config>, name), name);
}

// sy_moe_layer_config
template <>
inline constexpr sy_moe_layer_config kInit<sy_moe_layer_config> = SY_MOE_LAYER_CONFIG_INIT;
static_assert(kInit<sy_moe_layer_config>.hidden == MoeLayerConfig{}.hidden &&
              kInit<sy_moe_layer_config>.intermediate == MoeLayerConfig{}.intermediate &&
              kInit<sy_moe_layer_config>.max_tokens == MoeLayerConfig{}.max_tokens &&
              kInit<sy_moe_layer_config>.capacity == MoeLayerConfig{}.capacity &&
              kInit<sy_moe_layer_config>.num_experts == MoeLayerConfig{}.num_experts &&
              kInit<sy_moe_layer_config>.topk == MoeLayerConfig{}.topk &&
              kInit<sy_moe_layer_config>.dtype == static_cast<int>(MoeLayerConfig{}.dtype) &&
              kInit<sy_moe_layer_config>.order == static_cast<int>(MoeLayerConfig{}.order) &&
              kInit<sy_moe_layer_config>.exchange == static_cast<int>(MoeLayerConfig{}.exchange) &&
              kInit<sy_moe_layer_config>.form == static_cast<int>(MoeLayerConfig{}.form) &&
              kInit<sy_moe_layer_config>.overflow == static_cast<int>(MoeLayerConfig{}.overflow) &&
              kInit<sy_moe_layer_config>.captured == static_cast<int>(MoeLayerConfig{}.captured) &&
              kInit<sy_moe_layer_config>.storage == static_cast<int>(MoeLayerConfig{}.storage) &&
              kInit<sy_moe_layer_config>.row_scales == static_cast<int>(MoeLayerConfig{}.row_scales) &&
              kInit<sy_moe_layer_config>.weight_scales == static_cast<int>(MoeLayerConfig{}.weight_scales) &&
              kInit<sy_moe_layer_config>.invalid_ids == static_cast<int>(MoeLayerConfig{}.invalid_ids) &&
              kInit<sy_moe_layer_config>.w13_scales == MoeLayerConfig{}.w13_scales &&
              kInit<sy_moe_layer_config>.w2_scales == MoeLayerConfig{}.w2_scales &&
              kInit<sy_moe_layer_config>.accumulate == static_cast<int>(MoeLayerConfig{}.accumulate) &&
              kInit<sy_moe_layer_config>.scaling == static_cast<int>(MoeLayerConfig{}.scaling) &&
              kInit<sy_moe_layer_config>.intermediate_scaling == static_cast<int>(MoeLayerConfig{}.intermediate_scaling) &&
              kInit<sy_moe_layer_config>.intermediate_scale == MoeLayerConfig{}.intermediate_scale);
inline MoeLayerConfig twin_of(const sy_moe_layer_config& c, [[maybe_unused]] const char* name) {
  MoeLayerConfig twin;
  twin.hidden = c.hidden;
  twin.intermediate = c.intermediate;
  twin.max_tokens = c.max_tokens;
  twin.capacity = c.capacity;
  twin.num_experts = c.num_experts;
  twin.topk = c.topk;
  twin.dtype = to_enum_of<DType>(name, "dtype", c.dtype);
  twin.order = to_enum_of<CombineOrder>(name, "order", c.order);
  twin.exchange = to_enum_of<MoeExchange>(name, "exchange", c.exchange);
  twin.form = to_enum_of<MoeForm>(name, "form", c.form);
  twin.overflow = to_enum_of<Overflow>(name, "overflow", c.overflow);
  twin.captured = to_bool_of(name, "captured", c.captured);
  twin.storage = to_enum_of<WeightStorage>(name, "storage", c.storage);
  twin.row_scales = to_enum_of<ScaleKind>(name, "row_scales", c.row_scales);
  twin.weight_scales = to_enum_of<ScaleKind>(name, "weight_scales", c.weight_scales);
  twin.invalid_ids = to_enum_of<InvalidIds>(name, "invalid_ids", c.invalid_ids);
  twin.w13_scales = c.w13_scales;
  twin.w2_scales = c.w2_scales;
  twin.accumulate = to_enum_of<Accumulate>(name, "accumulate", c.accumulate);
  twin.scaling = to_enum_of<ScaleGranularity>(name, "scaling", c.scaling);
  twin.intermediate_scaling = to_enum_of<OutputScaling>(name, "intermediate_scaling", c.intermediate_scaling);
  require_range_of(name, "reserved", c.reserved, 0, 0);
  twin.intermediate_scale = c.intermediate_scale;
  return twin;
}
inline MoeLayerConfig from_c(const sy_moe_layer_config* given, const char* name = "config") {
  return twin_of(read_struct(given, kInit<sy_moe_layer_config>, name), name);
}

// sy_moe_layer_memory
inline void fill(sy_moe_layer_memory* to, const MoeLayerMemory& from) {
  write_struct(to, sy_moe_layer_memory{sizeof(sy_moe_layer_memory), from.heap_bytes, from.private_bytes, from.weight_bytes,
                    from.scratch_bytes, from.total()});
}

// sy_moe_layer_call
template <>
inline constexpr sy_moe_layer_call kInit<sy_moe_layer_call> = SY_MOE_LAYER_CALL_INIT;
static_assert(kInit<sy_moe_layer_call>.stream == MoeLayerCall{}.stream &&
              kInit<sy_moe_layer_call>.device_tokens == MoeLayerCall{}.device_tokens &&
              kInit<sy_moe_layer_call>.num_sms == MoeLayerCall{}.num_sms &&
              kInit<sy_moe_layer_call>.add == static_cast<int>(MoeLayerCall{}.add) &&
              kInit<sy_moe_layer_call>.weights_ready == MoeLayerCall{}.weights_ready);
inline MoeLayerCall twin_of(const sy_moe_layer_call& c, [[maybe_unused]] const char* name) {
  MoeLayerCall twin;
  twin.stream = c.stream;
  twin.device_tokens = c.device_tokens;
  twin.num_sms = c.num_sms;
  twin.add = to_bool_of(name, "add", c.add);
  require_range_of(name, "reserved", c.reserved, 0, 0);
  twin.weights_ready = c.weights_ready;
  return twin;
}

}  // namespace switchyard::detail
// clang-format on

// SPDX-License-Identifier: Apache-2.0
// C functions of the grouped GEMM and of expert rows.
#include "switchyard/gemm.hpp"

#include <cstddef>
#include <cstdint>

#include "capi/layer/objects.hpp"
#include "capi/views.hpp"
#include "switchyard/c/gemm.h"
#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"

using namespace switchyard;
using namespace switchyard::detail;

// NOLINTBEGIN(readability-identifier-naming): names of the C ABI
struct sy_grouped_gemm {
  GroupedGemm gemm;
};
// NOLINTEND(readability-identifier-naming)

namespace switchyard::detail {

template <>
inline constexpr bool kHasNoPadding<sy_grouped_gemm_config> = sizeof(sy_grouped_gemm_config) ==
                                                              sizeof(size_t) + 2 * sizeof(int64_t) + 7 * sizeof(int32_t) +
                                                                  3 * sizeof(float);

ExpertRows to_expert_rows(const sy_expert_rows* rows) {
  const sy_expert_rows r = read_struct<sy_expert_rows>(rows, SY_EXPERT_ROWS_INIT, "rows");
  return {r.num_rows, r.num_rows_32, r.first_row, r.rows_per_expert, r.scale_rows};
}

GroupedGemmOptions to_gemm_options(const sy_grouped_gemm_options* options) {
  return to_call<GroupedGemmOptions, sy_grouped_gemm_options>(options, SY_GROUPED_GEMM_OPTIONS_INIT, "options");
}

}  // namespace switchyard::detail

namespace {

constexpr sy_grouped_gemm_config kGemmConfig = SY_GROUPED_GEMM_CONFIG_INIT;
constexpr sy_grouped_gemm_options kGemmOptions = SY_GROUPED_GEMM_OPTIONS_INIT;
constexpr sy_dispatched_view kDispatchedView = SY_DISPATCHED_VIEW_INIT;
constexpr sy_low_latency_view kLowLatencyView = SY_LOW_LATENCY_VIEW_INIT;

// The macros must match the C++ defaults. Members keep their offsets forever: new ones are appended.
static_assert(kGemmConfig.type == static_cast<int>(GroupedGemmConfig{}.type) &&
              kGemmConfig.order == static_cast<int>(GroupedGemmConfig{}.order) &&
              kGemmConfig.epilogue == static_cast<int>(GroupedGemmConfig{}.epilogue) &&
              kGemmConfig.swiglu_limit == Swiglu{}.limit && kGemmConfig.swiglu_alpha == Swiglu{}.alpha &&
              kGemmConfig.swiglu_up_shift == Swiglu{}.up_shift &&
              kGemmConfig.weight_scales == static_cast<int>(GroupedGemmConfig{}.weight_scales) &&
              kGemmConfig.quantize == static_cast<int>(GroupedGemmConfig{}.quantize));
static_assert(kGemmOptions.stream == GroupedGemmOptions{}.stream && kGemmOptions.num_sms == GroupedGemmOptions{}.num_sms);
static_assert(offsetof(sy_grouped_gemm_config, num_experts) == 24 && sizeof(sy_grouped_gemm_config) == 64);
static_assert(offsetof(sy_expert_rows, scale_rows) == 40 && offsetof(sy_grouped_gemm_options, num_sms) == 16);
static_assert(SY_WEIGHTS_NK == static_cast<int>(WeightOrder::nk) &&
              SY_WEIGHTS_KN == static_cast<int>(WeightOrder::kn));
static_assert(SY_EPILOGUE_NONE == static_cast<int>(Epilogue::none) &&
              SY_EPILOGUE_RELU == static_cast<int>(Epilogue::relu) &&
              SY_EPILOGUE_SILU == static_cast<int>(Epilogue::silu) &&
              SY_EPILOGUE_SWIGLU == static_cast<int>(Epilogue::swiglu));

GroupedGemmConfig to_config(const sy_grouped_gemm_config* config) {
  const sy_grouped_gemm_config c = read_struct(config, kGemmConfig, "config");
  require_range("config->reserved", c.reserved, 0, 0);
  GroupedGemmConfig result;
  result.num_experts = c.num_experts;
  result.n = c.n;
  result.k = c.k;
  result.type = to_enum<DType>("config->dtype", c.type);
  result.order = to_enum<WeightOrder>("config->order", c.order);
  result.epilogue = to_enum<Epilogue>("config->epilogue", c.epilogue);
  result.swiglu = {c.swiglu_limit, c.swiglu_alpha, c.swiglu_up_shift};
  result.weight_scales = to_enum<ScaleKind>("config->weight_scales", c.weight_scales);
  result.quantize = to_enum<ScaleKind>("config->quantize", c.quantize);
  return result;
}

void write_expert_rows(sy_expert_rows* to, const ExpertRows& from) {
  write_struct(to, sy_expert_rows{sizeof(sy_expert_rows), from.num_rows, from.num_rows_32, from.first_row, from.rows_per_expert,
                                  from.scale_rows});
}

/// The members of a dispatch that ExpertRows::of reads.
Dispatched to_dispatched(const sy_dispatched_view* view) {
  const sy_dispatched_view v = read_struct(view, kDispatchedView, "dispatched");
  require_range("dispatched->num_local_experts", v.num_local_experts, 0, INT32_MAX);
  const auto experts = static_cast<size_t>(v.num_local_experts);
  if (experts > 0) require(v.tokens_per_expert, "dispatched->tokens_per_expert");
  Dispatched result;
  result.tokens_per_expert = {v.tokens_per_expert, experts};
  result.expert_first_row = {v.expert_first_row, v.expert_first_row ? experts : 0};
  return result;
}

/// The members of a low-latency output that ExpertRows::of reads, except the counts, which a view only borrows.
LowLatencyOutput to_output(const sy_low_latency_view& v) {
  LowLatencyOutput result;
  result.x.scale_kind = to_enum<ScaleKind>("output->x_scale_kind", v.x_scale_kind);
  result.rows_per_expert = v.rows_per_expert;
  result.scale_rows = v.scale_rows;
  result.scale_order = to_enum<ScaleOrder>("output->scale_order", v.scale_order);
  result.scale_group = v.scale_group;
  return result;
}

}  // namespace

extern "C" {

sy_code sy_grouped_gemm_output(const sy_grouped_gemm_config* config, int64_t* columns, sy_dtype* type) {
  return guarded([&] {
    const GroupedGemmConfig c = to_config(config);
    if (columns) *columns = c.columns();
    if (type) *type = static_cast<sy_dtype>(c.out_type());
  });
}

sy_code sy_expert_rows_of_dispatched(const sy_dispatched_view* dispatched, sy_expert_rows* rows) {
  return guarded([&] {
    check_struct(rows, sizeof *rows, "rows");
    write_expert_rows(rows, ExpertRows::of(to_dispatched(dispatched)));
  });
}

sy_code sy_expert_rows_of_low_latency(const sy_low_latency_view* output, sy_expert_rows* rows) {
  return guarded([&] {
    check_struct(rows, sizeof *rows, "rows");
    const sy_low_latency_view v = read_struct(output, kLowLatencyView, "output");
    ExpertRows result = ExpertRows::of(to_output(v));
    result.num_rows_32 = v.rows_of_expert;
    write_expert_rows(rows, result);
  });
}

sy_code sy_grouped_gemm_create(const sy_grouped_gemm_config* config, const void* weights, const void* weight_scales,
                                         sy_grouped_gemm** gemm) {
  return make_object("gemm", gemm, [&] { return GroupedGemm(to_config(config), weights, weight_scales); });
}

sy_code sy_grouped_gemm_destroy(sy_grouped_gemm* gemm) {
  delete gemm;
  return SY_OK;
}

sy_code sy_grouped_gemm_run(sy_grouped_gemm* gemm, const sy_const_row_view* x, const sy_expert_rows* rows,
                                      const sy_row_view* out, const sy_grouped_gemm_options* options) {
  return guarded([&] {
    require(gemm, "gemm");
    gemm->gemm.run(to_rows(x, "x"), to_expert_rows(rows), to_rows(out, "out"), to_gemm_options(options));
  });
}

}  // extern "C"

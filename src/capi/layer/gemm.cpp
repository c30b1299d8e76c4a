// SPDX-License-Identifier: Apache-2.0
// C functions for the grouped GEMM and for expert rows.
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

namespace {

constexpr sy_dispatched_view kDispatchedView = SY_DISPATCHED_VIEW_INIT;
constexpr sy_low_latency_view kLowLatencyView = SY_LOW_LATENCY_VIEW_INIT;

/// The dispatch members that ExpertRows::of reads.
Dispatched to_dispatched(const sy_dispatched_view* view) {
  const sy_dispatched_view v = read_struct(view, kDispatchedView, "dispatched");
  require_range("dispatched->num_local_experts", v.num_local_experts, 0, INT32_MAX);
  const auto experts = static_cast<size_t>(v.num_local_experts);
  if (experts > 0) require(v.tokens_per_expert, "dispatched->tokens_per_expert");
  Dispatched result;
  result.tokens_per_expert = {v.tokens_per_expert, experts};
  result.expert_first_row = {v.expert_first_row, v.expert_first_row ? experts : 0};
  result.x.cols = v.x_cols;
  result.x.scale_kind = to_enum<ScaleKind>("dispatched->x_scale_kind", v.x_scale_kind);
  return result;
}

/// The members of a low-latency output that ExpertRows::of reads, except the counts, which a view only borrows.
LowLatencyOutput to_output(const sy_low_latency_view& v) {
  LowLatencyOutput result;
  result.x.scale_kind = to_enum<ScaleKind>("output->x_scale_kind", v.x_scale_kind);
  result.x.cols = v.x_cols;
  result.rows_per_expert = v.rows_per_expert;
  result.scale_rows = v.scale_rows;
  result.scale_order = to_enum<ScaleOrder>("output->scale_order", v.scale_order);
  result.scale_group = v.scale_group;
  return result;
}

}  // namespace

extern "C" {

sy_code sy_grouped_gemm_output(const sy_grouped_gemm_config* config, int64_t* columns, sy_dtype* dtype) {
  return guarded([&] {
    const GroupedGemmConfig c = from_c(config);
    if (columns) *columns = c.columns();
    if (dtype) *dtype = static_cast<sy_dtype>(c.out_dtype());
  });
}

sy_code sy_expert_rows_of_dispatched(const sy_dispatched_view* dispatched, sy_expert_rows* rows) {
  return guarded([&] {
    check_struct(rows, sizeof *rows, "rows");
    fill(rows, ExpertRows::of(to_dispatched(dispatched)));
  });
}

sy_code sy_expert_rows_of_low_latency(const sy_low_latency_view* output, sy_expert_rows* rows) {
  return guarded([&] {
    check_struct(rows, sizeof *rows, "rows");
    const sy_low_latency_view v = read_struct(output, kLowLatencyView, "output");
    ExpertRows result = ExpertRows::of(to_output(v));
    result.num_rows_32 = v.rows_of_expert;
    fill(rows, result);
  });
}

sy_code sy_grouped_gemm_create(const sy_grouped_gemm_config* config, const void* weights, const void* weight_scales,
                               sy_grouped_gemm** gemm) {
  return make_object("gemm", gemm, [&] { return GroupedGemm(from_c(config), weights, weight_scales); });
}

sy_code sy_grouped_gemm_destroy(sy_grouped_gemm* gemm) {
  delete gemm;
  return SY_OK;
}

sy_code sy_grouped_gemm_run(sy_grouped_gemm* gemm, const sy_const_row_view* x, const sy_expert_rows* rows,
                            const sy_row_view* out, const sy_grouped_gemm_options* options) {
  return guarded([&] {
    require(gemm, "gemm");
    gemm->gemm.run(from_c(x, "x"), from_c(rows), from_c(out, "out"), from_c(options));
  });
}

}  // extern "C"

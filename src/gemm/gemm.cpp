// SPDX-License-Identifier: Apache-2.0
#include "switchyard/gemm.hpp"

#include <string>
#include <utility>

#include "base/enum_text.hpp"
#include "gemm/checks.hpp"
#include "gemm/gpu/gpu_gemm.hpp"
#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"

namespace switchyard {
namespace {

constexpr const char* kGemmClass = "GroupedGemm";

void require(bool ok, const std::string& what) { detail::require(ok, kGemmClass, what); }

void check_columns(const char* member, int64_t value, int64_t multiple) {
  detail::check_columns(kGemmClass, member, value, multiple);
}

void check_config(const GroupedGemmConfig& c) {
  detail::check_experts(kGemmClass, c.num_experts);
  require(is_named(c.order),
          "order = " + std::to_string(static_cast<int>(c.order)) + ": must be " + detail::numbered_names<WeightOrder>());
  require(is_named(c.epilogue),
          "epilogue = " + std::to_string(static_cast<int>(c.epilogue)) + ": must be " + detail::numbered_names<Epilogue>());
  const bool fp8 = c.dtype == DType::fp8_e4m3;
  require(is_named(c.dtype) && c.dtype != DType::f32,
          std::string("dtype = ") + to_string(c.dtype) + ": must be bf16, f16 or fp8_e4m3");
  require(is_named(c.quantize) && is_named(c.weight_scales),
          "quantize and weight_scales must be " + detail::numbered_names<ScaleKind>());
  check_columns("n", c.n, c.quantize != ScaleKind::none ? 32 : c.epilogue == Epilogue::swiglu ? 16 : 8);
  check_columns("k", c.k, fp8 ? 16 : 8);
  require(!fp8 || c.order == WeightOrder::nk, "order = kn: must be nk for fp8_e4m3");
  require(!fp8 || c.weight_scales != ScaleKind::none, "weight_scales = none: must be f32 or ue8m0 for fp8_e4m3");
  require(c.quantize == ScaleKind::none || (fp8 && c.epilogue == Epilogue::swiglu),
          std::string("quantize = ") + to_string(c.quantize) + ": must be none but for fp8_e4m3 with swiglu");
  require(is_named(c.accumulate), "accumulate = " + std::to_string(static_cast<int>(c.accumulate)) + ": must be " +
                                      detail::numbered_names<Accumulate>());
  require(c.accumulate == Accumulate::exact || (fp8 && c.scaling == ScaleGranularity::block),
          "accumulate = fast: must be exact but for fp8_e4m3 with scaling block");
  require(is_named(c.scaling), "scaling = " + std::to_string(static_cast<int>(c.scaling)) + ": must be " +
                                   detail::numbered_names<ScaleGranularity>());
  const bool block = c.scaling == ScaleGranularity::block;
  require(fp8 || block, std::string("scaling = ") + to_string(c.scaling) + ": must be block but for fp8_e4m3");
  require(block || c.weight_scales == ScaleKind::f32, "weight_scales = ue8m0: must be f32 unless scaling is block");
  require(is_named(c.output_scaling), "output_scaling = " + std::to_string(static_cast<int>(c.output_scaling)) + ": must be " +
                                          detail::numbered_names<OutputScaling>());
  require(c.output_scaling == OutputScaling::per_group || (!block && c.quantize == ScaleKind::f32),
          std::string("output_scaling = ") + to_string(c.output_scaling) +
              ": must be per_group unless quantize is f32 and scaling is not block");
  require(c.swiglu.limit > 0, "swiglu.limit = " + std::to_string(c.swiglu.limit) + ": must be above 0");
}

/// `per_row`: one float32 scale per row.
void check_rows(const char* name, const ConstRows& given, DType type, int64_t columns, bool per_row, bool only_f32) {
  detail::check_rows(kGemmClass, name, given, type, columns);
  if (given.rows == 0) return;
  detail::check_aligned(kGemmClass, name, given.data);
  if (type != DType::fp8_e4m3) return;
  const std::string text = name;
  require(given.scale_kind == ScaleKind::f32 || given.scale_kind == ScaleKind::ue8m0,
          text + " has no scales: must have f32 or ue8m0, one for 128 columns");
  require(!only_f32 || given.scale_kind == ScaleKind::f32, text + " has scales of ue8m0: must be f32 unless scaling is block");
  if (!per_row) return detail::check_aligned(kGemmClass, (text + ".scales").c_str(), given.scales);
  require(given.scales != nullptr, text + ".scales is null");
  require(reinterpret_cast<uintptr_t>(given.scales) % 4 == 0, text + ".scales must begin at a multiple of 4 bytes");
}

void check_call(const GroupedGemmConfig& c, const Rows& out, const GroupedGemmOptions& options) {
  require((c.output_scaling == OutputScaling::fixed) == (options.output_scale != nullptr),
          options.output_scale == nullptr ? "options.output_scale is null: output_scaling is fixed"
                                          : "options.output_scale is given: must be null unless output_scaling is fixed");
  require((c.output_scaling == OutputScaling::per_row) == (options.scratch != nullptr) || out.rows == 0,
          options.scratch == nullptr ? "options.scratch is null: output_scaling is per_row"
                                     : "options.scratch is given: must be null unless output_scaling is per_row");
  require(reinterpret_cast<uintptr_t>(options.output_scale) % 4 == 0,
          "options.output_scale must begin at a multiple of 4 bytes");
  if (options.scratch != nullptr) detail::check_aligned(kGemmClass, "options.scratch", options.scratch);
}

/// Words of a dispatch's scale row; 0 if the scales are not float32.
int64_t scale_words(const ConstRows& x) {
  return x.scale_kind == ScaleKind::f32 ? static_cast<int64_t>(scale_row_bytes(x.cols, ScaleKind::f32) / sizeof(float)) : 0;
}

void check_scale_places(const GroupedGemmConfig& c, const ConstRows& x, const ExpertRows& rows) {
  require(rows.scale_rows >= 0 && (rows.scale_rows == 0 || rows.scale_rows >= rows.rows_per_expert),
          "rows.scale_rows = " + std::to_string(rows.scale_rows) + ": must be 0, or at least rows_per_expert");
  if (c.scaling != ScaleGranularity::per_channel || rows.scale_rows > 0 || x.rows == 0) return;
  const int64_t stride = rows.scale_stride, words = scale_words(x);
  require(stride == 0 || stride == 1 || stride == words, "rows.scale_stride = " + std::to_string(stride) +
                                                             ": must be 0, 1 or " + std::to_string(words) +
                                                             ", the words in a row of scales of x");
}

}  // namespace

ExpertRows ExpertRows::of(const Dispatched& dispatched) {
  const bool no_experts = dispatched.tokens_per_expert.empty();  // none on this rank; null pointers are then allowed
  require(no_experts || dispatched.expert_first_row.data() != nullptr,
          "the rows of a rank-major dispatch are not in the order of experts");
  ExpertRows rows;
  rows.num_rows = dispatched.tokens_per_expert.data();
  rows.first_row = dispatched.expert_first_row.data();
  rows.scale_stride = scale_words(dispatched.x);
  return rows;
}

ExpertRows ExpertRows::of(const LowLatencyOutput& output) {
  const bool scaled = output.x.scale_kind != ScaleKind::none;
  require(!scaled || output.scale_group == kScaleGroup,
          "the output's scale_group = " + std::to_string(output.scale_group) + ": must be " + std::to_string(kScaleGroup));
  ExpertRows rows;
  rows.num_rows_32 = output.rows_of_expert;
  rows.rows_per_expert = output.rows_per_expert;
  if (scaled && output.scale_order == ScaleOrder::column_major) rows.scale_rows = output.scale_rows;
  rows.scale_stride = scale_words(output.x);
  return rows;
}

GroupedGemm::GroupedGemm(const GroupedGemmConfig& config, const void* weights, const void* weight_scales) {
  check_config(config);
  detail::check_aligned(kGemmClass, "weights", weights);
  const bool fp8 = config.dtype == DType::fp8_e4m3;
  require((weight_scales != nullptr) == fp8,
          fp8 ? "weight_scales is null" : "weight_scales is given: must be null but for fp8_e4m3");
  require(reinterpret_cast<uintptr_t>(weight_scales) % 4 == 0, "weight_scales must begin at a multiple of 4 bytes");
  impl_ = detail::gemm::make_grouped_gemm(config, weights, weight_scales);
}
GroupedGemm::GroupedGemm(GroupedGemm&&) noexcept = default;
GroupedGemm& GroupedGemm::operator=(GroupedGemm&&) noexcept = default;
GroupedGemm::~GroupedGemm() = default;

void GroupedGemm::run(const ConstRows& x, const ExpertRows& rows, const Rows& out, const GroupedGemmOptions& options) {
  const GroupedGemmConfig& c = impl_->config;
  const bool block = c.scaling == ScaleGranularity::block;
  check_rows("x", x, c.dtype, c.k, c.scaling == ScaleGranularity::per_channel, !block);
  check_rows("out", out, c.out_dtype(), c.columns(), c.output_scaling != OutputScaling::per_group, false);
  check_call(c, out, options);
  require(c.quantize == ScaleKind::none || out.rows == 0 || out.scale_kind == c.quantize,
          std::string("out has scales of ") + to_string(out.scale_kind) + ": must be of quantize, " + to_string(c.quantize));
  detail::check_ranges(kGemmClass, rows);
  check_scale_places(c, x, rows);
  if (x.rows > 0 && out.rows > 0) impl_->run(x, rows, out, options);
}

const GroupedGemmConfig& GroupedGemm::config() const { return impl_->config; }

}  // namespace switchyard

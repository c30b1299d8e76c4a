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
  require(fp8 || c.accumulate == Accumulate::exact, "accumulate = fast: must be exact but for fp8_e4m3");
  require(c.swiglu.limit > 0, "swiglu.limit = " + std::to_string(c.swiglu.limit) + ": must be above 0");
}

void check_rows(const char* name, const ConstRows& given, DType type, int64_t columns) {
  detail::check_rows(kGemmClass, name, given, type, columns);
  if (given.rows == 0) return;
  detail::check_aligned(kGemmClass, name, given.data);
  if (type != DType::fp8_e4m3) return;
  const std::string text = name;
  require(given.scale_kind == ScaleKind::f32 || given.scale_kind == ScaleKind::ue8m0,
          text + " has no scales: must have f32 or ue8m0, one for 128 columns");
  detail::check_aligned(kGemmClass, (text + ".scales").c_str(), given.scales);
}

}  // namespace

ExpertRows ExpertRows::of(const Dispatched& dispatched) {
  const bool no_experts = dispatched.tokens_per_expert.empty();  // none on this rank; null pointers are then allowed
  require(no_experts || dispatched.expert_first_row.data() != nullptr,
          "the rows of a rank-major dispatch are not in the order of experts");
  ExpertRows rows;
  rows.num_rows = dispatched.tokens_per_expert.data();
  rows.first_row = dispatched.expert_first_row.data();
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
  check_rows("x", x, c.dtype, c.k);
  check_rows("out", out, c.out_dtype(), c.columns());
  require(c.quantize == ScaleKind::none || out.rows == 0 || out.scale_kind == c.quantize,
          std::string("out has scales of ") + to_string(out.scale_kind) + ": must be of quantize, " + to_string(c.quantize));
  detail::check_ranges(kGemmClass, rows);
  require(rows.scale_rows >= 0 && (rows.scale_rows == 0 || rows.scale_rows >= rows.rows_per_expert),
          "rows.scale_rows = " + std::to_string(rows.scale_rows) + ": must be 0, or at least rows_per_expert");
  if (x.rows > 0 && out.rows > 0) impl_->run(x, rows, out, options);
}

const GroupedGemmConfig& GroupedGemm::config() const { return impl_->config; }

}  // namespace switchyard

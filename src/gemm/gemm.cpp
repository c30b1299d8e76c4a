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

constexpr const char* kClass = "GroupedGemm";

void require(bool ok, const std::string& what) { detail::require(ok, kClass, what); }

void check_columns(const char* member, int64_t value, int64_t multiple) {
  detail::check_columns(kClass, member, value, multiple);
}

void check_config(const GroupedGemmConfig& c) {
  detail::check_experts(kClass, c.num_experts);
  require(is_named(c.order),
          "order = " + std::to_string(static_cast<int>(c.order)) + ": must be " + detail::numbered_names<WeightOrder>());
  require(is_named(c.epilogue),
          "epilogue = " + std::to_string(static_cast<int>(c.epilogue)) + ": must be " + detail::numbered_names<Epilogue>());
  check_columns("n", c.n, c.epilogue == Epilogue::swiglu ? 16 : 8);
  check_columns("k", c.k, 8);
  require(c.type == DType::bf16 || c.type == DType::f16, std::string("type = ") + to_string(c.type) + ": must be bf16 or f16");
  require(c.swiglu.limit > 0, "swiglu.limit = " + std::to_string(c.swiglu.limit) + ": must be above 0");
}

void check_rows(const char* name, const ConstRows& given, const GroupedGemmConfig& c, int64_t columns) {
  detail::check_rows(kClass, name, given, c.type, columns);
  if (given.rows > 0) detail::check_aligned(kClass, name, given.data);
}

}  // namespace

ExpertRows ExpertRows::of(const Dispatched& dispatched) {
  const bool no_experts = dispatched.tokens_per_expert.empty();  // on this rank: then there is nothing to be null
  require(no_experts || dispatched.expert_first_row.data() != nullptr,
          "the rows of a rank-major dispatch are not in the order of experts");
  ExpertRows rows;
  rows.num_rows = dispatched.tokens_per_expert.data();
  rows.first_row = dispatched.expert_first_row.data();
  return rows;
}

ExpertRows ExpertRows::of(const LowLatencyOutput& output) {
  ExpertRows rows;
  rows.num_rows_32 = output.rows_of_expert;
  rows.rows_per_expert = output.rows_per_expert;
  return rows;
}

GroupedGemm::GroupedGemm(const GroupedGemmConfig& config, const void* weights) {
  check_config(config);
  detail::check_aligned(kClass, "weights", weights);
  impl_ = detail::gemm::make_grouped_gemm(config, weights);
}
GroupedGemm::GroupedGemm(GroupedGemm&&) noexcept = default;
GroupedGemm& GroupedGemm::operator=(GroupedGemm&&) noexcept = default;
GroupedGemm::~GroupedGemm() = default;

void GroupedGemm::run(const ConstRows& x, const ExpertRows& rows, const Rows& out, const GroupedGemmOptions& options) {
  const GroupedGemmConfig& c = impl_->config;
  check_rows("x", x, c, c.k);
  check_rows("out", out, c, c.columns());
  detail::check_ranges(kClass, rows);
  if (x.rows > 0 && out.rows > 0) impl_->run(x, rows, out, options);
}

const GroupedGemmConfig& GroupedGemm::config() const { return impl_->config; }

}  // namespace switchyard

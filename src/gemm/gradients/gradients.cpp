// SPDX-License-Identifier: Apache-2.0
#include "switchyard/gemm_gradients.hpp"

#include <string>

#include "gemm/checks.hpp"
#include "gemm/gradients/gpu_gradients.hpp"

namespace switchyard {
namespace {

constexpr const char* kWeight = detail::kWeightGradientObject;
constexpr const char* kSwiglu = detail::kSwigluGradientObject;
constexpr const char* kRouting = detail::kRoutingGradientObject;

void check_type(const char* where, DType type) {
  detail::require(type == DType::bf16 || type == DType::f16, where,
                  std::string("dtype = ") + to_string(type) + ": must be bf16 or f16");
}

void check_config(const WeightGradientConfig& c) {
  detail::check_experts(kWeight, c.num_experts);
  detail::check_columns(kWeight, "n", c.n, 8);
  detail::check_columns(kWeight, "k", c.k, 8);
  check_type(kWeight, c.dtype);
  detail::require(
      c.out_dtype == DType::f32 || c.out_dtype == c.dtype, kWeight,
      std::string("out_dtype = ") + to_string(c.out_dtype) + ": must be f32 or " + to_string(c.dtype) + ", as dtype");
}
void check_config(const SwigluGradientConfig& c) {
  detail::check_experts(kSwiglu, c.num_experts);
  detail::check_columns(kSwiglu, "columns", c.columns, 8);
  detail::require(2 * c.columns <= kMaxGemmColumns, kSwiglu,
                  "columns = " + std::to_string(c.columns) + ": must be at most " + std::to_string(kMaxGemmColumns / 2));
  check_type(kSwiglu, c.dtype);
  detail::require(c.swiglu.limit > 0, kSwiglu, "swiglu.limit = " + std::to_string(c.swiglu.limit) + ": must be above 0");
}
void check_config(const RoutingGradientConfig& c) {
  detail::check_experts(kRouting, c.num_experts);
  detail::check_columns(kRouting, "columns", c.columns, 8);
  check_type(kRouting, c.dtype);
}

/// Checks rows, including the alignment that the kernels require.
void check_rows(const char* where, const char* name, const ConstRows& given, DType type, int64_t columns) {
  detail::check_rows(where, name, given, type, columns);
  if (given.rows > 0) detail::check_aligned(where, name, given.data);
}

}  // namespace

WeightGradient::WeightGradient(const WeightGradientConfig& config) {
  check_config(config);
  impl_ = detail::gemm::make_weight_gradient(config);
}
WeightGradient::WeightGradient(WeightGradient&&) noexcept = default;
WeightGradient& WeightGradient::operator=(WeightGradient&&) noexcept = default;
WeightGradient::~WeightGradient() = default;
const WeightGradientConfig& WeightGradient::config() const { return impl_->config; }

void WeightGradient::run(const ConstRows& dy, const ConstRows& x, const ExpertRows& rows, void* dw,
                         const GroupedGemmOptions& options) {
  const WeightGradientConfig& c = impl_->config;
  check_rows(kWeight, "dy", dy, c.dtype, c.n);
  check_rows(kWeight, "x", x, c.dtype, c.k);
  detail::check_ranges(kWeight, rows);
  detail::check_aligned(kWeight, "dw", dw);
  impl_->run(dy, x, rows, dw, options);
}

SwigluGradient::SwigluGradient(const SwigluGradientConfig& config) {
  check_config(config);
  impl_ = detail::gemm::make_swiglu_gradient(config);
}
SwigluGradient::SwigluGradient(SwigluGradient&&) noexcept = default;
SwigluGradient& SwigluGradient::operator=(SwigluGradient&&) noexcept = default;
SwigluGradient::~SwigluGradient() = default;
const SwigluGradientConfig& SwigluGradient::config() const { return impl_->config; }

void SwigluGradient::run(const ConstRows& h, const ConstRows& da, const ExpertRows& rows, const Rows& dh, const Rows& a,
                         const GroupedGemmOptions& options) {
  const SwigluGradientConfig& c = impl_->config;
  check_rows(kSwiglu, "h", h, c.dtype, 2 * c.columns);
  check_rows(kSwiglu, "da", da, c.dtype, c.columns);
  check_rows(kSwiglu, "dh", dh, c.dtype, 2 * c.columns);
  if (a.data != nullptr) check_rows(kSwiglu, "a", a, c.dtype, c.columns);
  detail::check_ranges(kSwiglu, rows);
  impl_->run(h, da, rows, dh, a, options);
}

RoutingGradient::RoutingGradient(const RoutingGradientConfig& config) {
  check_config(config);
  impl_ = detail::gemm::make_routing_gradient(config);
}
RoutingGradient::RoutingGradient(RoutingGradient&&) noexcept = default;
RoutingGradient& RoutingGradient::operator=(RoutingGradient&&) noexcept = default;
RoutingGradient::~RoutingGradient() = default;
const RoutingGradientConfig& RoutingGradient::config() const { return impl_->config; }

void RoutingGradient::run(const ConstRows& dy, const ConstRows& y, const ExpertRows& rows, float* dweight,
                          const GroupedGemmOptions& options) {
  const RoutingGradientConfig& c = impl_->config;
  check_rows(kRouting, "dy", dy, c.dtype, c.columns);
  check_rows(kRouting, "y", y, c.dtype, c.columns);
  detail::check_ranges(kRouting, rows);
  const bool any = dy.rows > 0 && y.rows > 0;
  detail::require(!any || dweight != nullptr, kRouting, "dweight is null");
  detail::require(reinterpret_cast<uintptr_t>(dweight) % alignof(float) == 0, kRouting,
                  "dweight must begin at a multiple of 4 bytes");
  impl_->run(dy, y, rows, dweight, options);
}

}  // namespace switchyard

// SPDX-License-Identifier: Apache-2.0
#include "switchyard/expert.hpp"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "base/enum_text.hpp"
#include "gemm/checks.hpp"
#include "gemm/experts.hpp"

namespace switchyard {
namespace {

using detail::require;

constexpr const char* kExpertClass = "ExpertMlp";
constexpr const char* kForward = "ExpertMlp::forward";

void check_shape(const ExpertShape& shape) {
  constexpr int64_t kMaxWidth = int64_t{1} << 24;
  require(shape.hidden >= 1 && shape.hidden <= kMaxWidth, kExpertClass,
          "shape.hidden is " + std::to_string(shape.hidden) + "; allowed: 1 to " + std::to_string(kMaxWidth));
  require(shape.intermediate >= 1 && shape.intermediate <= kMaxWidth, kExpertClass,
          "shape.intermediate is " + std::to_string(shape.intermediate) + "; allowed: 1 to " + std::to_string(kMaxWidth));
  const int64_t max_experts = (int64_t{1} << 59) / (shape.hidden * shape.intermediate);
  require(shape.num_local_experts >= 0 && shape.num_local_experts <= max_experts, kExpertClass,
          "shape.num_local_experts is " + std::to_string(shape.num_local_experts) + "; allowed: 0 to " +
              std::to_string(max_experts) + ", so that the size of the weights is a number of 64 bits");
}

void check_gpu(const ExpertShape& shape, const ExpertOptions& options) {
  const bool fp8 = options.dtype == DType::fp8_e4m3;
  const int64_t step = fp8 ? 16 : 8;
  const auto width = [&](const char* member, int64_t value, int64_t max) {
    require(value % step == 0 && value <= max, kExpertClass,
            std::string("shape.") + member + " is " + std::to_string(value) + "; allowed on GPUs" + (fp8 ? " in fp8" : "") +
                ": a multiple of " + std::to_string(step) + ", at most " + std::to_string(max));
  };
  width("hidden", shape.hidden, kMaxGemmColumns);
  width("intermediate", shape.intermediate, kMaxGemmColumns / 2);
  require(shape.num_local_experts <= kMaxGemmExperts, kExpertClass,
          "shape.num_local_experts is " + std::to_string(shape.num_local_experts) + "; allowed on GPUs: 0 to " +
              std::to_string(kMaxGemmExperts));
  require(options.storage == WeightStorage::view, kExpertClass,
          "options.storage is packed; allowed on GPUs: view, as the weights are read where the caller has them");
  constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1024;
  require(options.max_rows >= 0 && options.max_rows <= kMaxRows, kExpertClass,
          "options.max_rows is " + std::to_string(options.max_rows) + "; allowed: 0 to " + std::to_string(kMaxRows));
}

/// `prefix`: of the name in errors.
void check_no_scale(const char* where, const char* prefix, const float* intermediate_scale, OutputScaling scaling) {
  require(intermediate_scale == nullptr || scaling == OutputScaling::fixed, where,
          std::string(prefix) + "intermediate_scale is given; allowed: null unless options.intermediate_scaling is fixed");
}

void check_scaling(const ExpertOptions& o) {
  require(is_named(o.scaling), kExpertClass,
          "options.scaling is " + std::to_string(static_cast<int>(o.scaling)) +
              "; allowed: " + detail::numbered_names<ScaleGranularity>());
  require(is_named(o.intermediate_scaling), kExpertClass,
          "options.intermediate_scaling is " + std::to_string(static_cast<int>(o.intermediate_scaling)) +
              "; allowed: " + detail::numbered_names<OutputScaling>());
  const bool block = o.scaling == ScaleGranularity::block;
  require(block || o.dtype == DType::fp8_e4m3, kExpertClass,
          std::string("options.scaling is ") + to_string(o.scaling) + "; allowed: block, and others for fp8_e4m3");
  require(block || o.accumulate == Accumulate::exact, kExpertClass,
          "options.accumulate is fast; allowed: exact unless options.scaling is block");
  require(
      block || o.weight_scales == ScaleKind::f32, kExpertClass,
      std::string("options.weight_scales is ") + to_string(o.weight_scales) + "; allowed: f32 unless options.scaling is block");
  require(!block || o.intermediate_scaling == OutputScaling::per_group, kExpertClass,
          std::string("options.intermediate_scaling is ") + to_string(o.intermediate_scaling) +
              "; allowed: per_group if options.scaling is block");
  check_no_scale(kExpertClass, "options.", o.intermediate_scale, o.intermediate_scaling);
}

void check_options(const ExpertShape& shape, const ExpertOptions& options) {
  check_shape(shape);
  require(is_named(options.backend), kExpertClass,
          "options.backend is " + std::to_string(static_cast<int>(options.backend)) +
              "; allowed: " + detail::numbered_names<Backend>());
  require(is_named(options.storage), kExpertClass,
          "options.storage is " + std::to_string(static_cast<int>(options.storage)) +
              "; allowed: " + detail::numbered_names<WeightStorage>());
  require(options.route_scratch_bytes <= std::numeric_limits<size_t>::max() / 4, kExpertClass,
          "options.route_scratch_bytes is " + std::to_string(options.route_scratch_bytes) + ", which is no size of a memory");
  require(is_named(options.dtype) && options.dtype != DType::f32, kExpertClass,
          std::string("options.dtype is ") + to_string(options.dtype) + "; allowed: bf16, and on GPUs f16 and fp8_e4m3");
  require(is_named(options.accumulate), kExpertClass,
          "options.accumulate is " + std::to_string(static_cast<int>(options.accumulate)) +
              "; allowed: " + detail::numbered_names<Accumulate>());
  require(options.dtype == DType::fp8_e4m3 || options.accumulate == Accumulate::exact, kExpertClass,
          "options.accumulate is fast; allowed: exact, and for fp8_e4m3 fast");
  check_scaling(options);
  if (options.backend == Backend::cuda) return check_gpu(shape, options);
  if (options.dtype != DType::bf16)
    throw Error(ErrorCode::unsupported,
                std::string("ExpertMlp: options.dtype is ") + to_string(options.dtype) + "; allowed on the CPU: bf16");
}

/// Checks weights; the options must already have been checked. `scales` is the prefix of a scale's name in errors.
void check_weights(const char* where, const char* scales, const ExpertShape& shape, const MoeWeights& w,
                   const ExpertOptions& options) {
  check_no_scale(where, scales, w.intermediate_scale, options.intermediate_scaling);
  if (shape.num_local_experts == 0) return;
  const auto given = [&](const std::string& name, const void* p, const char* what) {
    require(p != nullptr, where, name + " is null; allowed: " + what + std::to_string(shape.num_local_experts) + " experts");
  };
  given("w13", w.w13, "the weights of ");
  given("w2", w.w2, "the weights of ");
  if (options.backend == Backend::cpu) return;
  detail::check_aligned(where, "w13", w.w13);
  detail::check_aligned(where, "w2", w.w2);
  if (options.dtype != DType::fp8_e4m3) return;
  given(std::string(scales) + "w13_scales", w.w13_scales, "for fp8_e4m3 the scales of the weights of ");
  given(std::string(scales) + "w2_scales", w.w2_scales, "for fp8_e4m3 the scales of the weights of ");
  if (options.intermediate_scaling != OutputScaling::fixed) return;
  given(std::string(scales) + "intermediate_scale", w.intermediate_scale, "for OutputScaling::fixed one scale of ");
  require(reinterpret_cast<uintptr_t>(w.intermediate_scale) % 4 == 0, where,
          std::string(scales) + "intermediate_scale must begin at a multiple of 4 bytes");
}

[[noreturn]] void cpu_only(const char* where, const char* instead) {
  throw Error(ErrorCode::unsupported, std::string(where) + ": on the CPU only; these experts are a GPU's" + instead);
}

}  // namespace

void ExpertMlp::Impl::forward_on_host(const uint16_t*, std::span<const int64_t>, std::span<const int64_t>, uint16_t*) {
  cpu_only("ExpertMlp::forward with arrays of the host", ", which take ExpertRows");
}
void ExpertMlp::Impl::forward_rank_major(const uint16_t*, const ExpertIds&, const float*, uint16_t*) {
  cpu_only("ExpertMlp::forward_rank_major", ", which take the rows of an expert-major dispatch");
}

ExpertMlp::ExpertMlp(const ExpertShape& shape, const void* w13, const void* w2, const ExpertOptions& options) {
  check_options(shape, options);
  check_weights(kExpertClass, "options.", shape,
                {w13, w2, options.w13_scales, options.w2_scales, nullptr, options.intermediate_scale}, options);
  impl_ = options.backend == Backend::cpu ? detail::make_cpu_experts(shape, w13, w2, options)
                                          : detail::make_gpu_experts(shape, w13, w2, options);
}

ExpertMlp::ExpertMlp(const ExpertShape& shape, const Source& source, const ExpertOptions& options) {
  check_options(shape, options);
  require(static_cast<bool>(source), kExpertClass, "source is empty; allowed: a function that writes one expert's weights");
  require(options.storage == WeightStorage::packed, kExpertClass,
          "options.storage is view; allowed with a source: packed, as there is nothing to view");
  impl_ = detail::make_cpu_experts(shape, source, options);
}

ExpertMlp::ExpertMlp(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ExpertMlp::ExpertMlp(ExpertMlp&&) noexcept = default;
ExpertMlp& ExpertMlp::operator=(ExpertMlp&&) noexcept = default;
ExpertMlp::~ExpertMlp() = default;

ExpertMemory ExpertMlp::memory_required(const ExpertShape& shape, const ExpertOptions& options) {
  check_options(shape, options);
  if (options.backend == Backend::cpu) return detail::cpu_experts_memory(shape, options);
  return {0, detail::intermediate_bytes(shape, options)};
}

void ExpertMlp::forward(const ConstRows& x, const ExpertRows& rows, const Rows& y, const ExpertCall& call) {
  Impl& impl = *impl_;
  detail::check_rows(kForward, "x", x, impl.type, impl.shape.hidden);
  detail::check_rows(kForward, "y", y, impl.type == DType::fp8_e4m3 ? DType::bf16 : impl.type, impl.shape.hidden);
  if (impl.shape.num_local_experts == 0) return;
  detail::check_ranges(kForward, rows);
  if (x.rows > 0 && y.rows > 0) impl.forward(x, rows, y, call);
}

void ExpertMlp::forward(const uint16_t* x, std::span<const int64_t> first_row, std::span<const int64_t> num_rows, uint16_t* y) {
  const auto experts = static_cast<size_t>(impl_->shape.num_local_experts);
  require(first_row.size() == experts && num_rows.size() == experts, kForward,
          "first_row and num_rows have " + std::to_string(first_row.size()) + " and " + std::to_string(num_rows.size()) +
              " entries; allowed: one per local expert, " + std::to_string(experts));
  bool any = false;
  for (size_t e = 0; e < experts; ++e) {
    require(num_rows[e] >= 0 && (num_rows[e] == 0 || first_row[e] >= 0), kForward,
            "local expert " + std::to_string(e) + " has first_row " + std::to_string(first_row[e]) + " and num_rows " +
                std::to_string(num_rows[e]) + "; allowed: >= 0");
    any |= num_rows[e] > 0;
  }
  require(!any || (x != nullptr && y != nullptr), kForward, "x or y is null; allowed only if all num_rows are 0");
  impl_->forward_on_host(x, first_row, num_rows, y);
}

void ExpertMlp::forward_rank_major(const uint16_t* x, const ExpertIds& ids, const float* weights, uint16_t* y) {
  const char* where = "ExpertMlp::forward_rank_major";
  require(ids.num_tokens >= 0, where, "topk_ids.num_tokens is " + std::to_string(ids.num_tokens) + "; allowed: >= 0");
  if (ids.num_tokens > 0) {
    require(ids.topk >= 1 && ids.topk <= kMaxTopk, where,
            "topk_ids.topk is " + std::to_string(ids.topk) + "; allowed: 1 to " + std::to_string(kMaxTopk));
    require(ids.data != nullptr && x != nullptr && y != nullptr, where,
            "topk_ids.data, x or y is null; allowed only if topk_ids.num_tokens is 0");
  }
  impl_->forward_rank_major(x, ids, weights, y);
}

ExpertMlp ExpertMlp::with_weights(const MoeWeights& weights) const {
  const Impl& impl = *impl_;
  check_weights("ExpertMlp::with_weights", "", impl.shape, weights, impl.options);
  std::unique_ptr<Impl> made = impl.with_weights(weights);
  made->steps = impl.steps;
  return ExpertMlp(std::move(made));
}

void detail::observe_steps(ExpertMlp& mlp, ExpertSteps* steps) { mlp.impl_->steps = steps; }

const ExpertShape& ExpertMlp::shape() const { return impl_->shape; }

ExpertMemory ExpertMlp::memory() const { return impl_->memory(); }

std::string ExpertMlp::implementation() const { return impl_->implementation(); }

}  // namespace switchyard

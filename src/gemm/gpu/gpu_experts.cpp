// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "gemm/checks.hpp"
#include "gemm/experts.hpp"
#include "gemm/gpu/gpu_memory.hpp"

namespace switchyard::detail {
namespace {

constexpr const char* kForward = "ExpertMlp::forward";

/// Two grouped GEMMs, with the intermediate rows between them.
class GpuExperts final : public ExpertMlp::Impl {
 public:
  /// `shared`: rows shared with other experts; if null, separate rows are allocated.
  GpuExperts(const ExpertShape& shape_in, const MoeWeights& weights, const ExpertOptions& options_in,
             const gemm::GpuMemory* shared)
      : Impl(shape_in, options_in), bytes_(intermediate_bytes(shape, options)) {
    if (shape.num_local_experts == 0) return;
    GroupedGemmConfig up;
    up.num_experts = shape.num_local_experts;
    up.n = 2 * shape.intermediate;
    up.k = shape.hidden;
    up.dtype = type;
    up.epilogue = Epilogue::swiglu;
    up.weight_scales = options.weight_scales;
    up.accumulate = options.accumulate;
    up.scaling = options.scaling;
    GroupedGemmConfig down = up;
    down.n = shape.hidden;
    down.k = shape.intermediate;
    down.epilogue = Epilogue::none;
    if (up.scaling != ScaleGranularity::block)
      down.scaling = options.intermediate_scaling == OutputScaling::per_group ? ScaleGranularity::group_channel
                                                                              : ScaleGranularity::per_channel;
    if (is_fp8()) up.quantize = ScaleKind::f32;
    up.output_scaling = options.intermediate_scaling;
    scale_ = weights.intermediate_scale;
    gate_up_.emplace(up, weights.w13, is_fp8() ? weights.w13_scales : nullptr);
    down_.emplace(down, weights.w2, is_fp8() ? weights.w2_scales : nullptr);
    if (shared != nullptr)
      intermediate_.emplace(*shared);
    else if (bytes_ > 0)
      intermediate_.emplace("ExpertMlp", bytes_);
  }

  void forward(const ConstRows& x, const ExpertRows& rows, const Rows& y, const ExpertCall& call) override {
    require(x.rows <= options.max_rows, kForward,
            "x has " + std::to_string(x.rows) + " rows; allowed: at most ExpertOptions::max_rows, " +
                std::to_string(options.max_rows));
    check_aligned(kForward, "x", x.data);
    check_aligned(kForward, "y", y.data);
    Rows between{intermediate_->data(), x.rows, shape.intermediate, type};
    const GroupedGemmOptions how{call.stream, call.num_sms};
    GroupedGemmOptions first = how;
    if (is_fp8()) {
      // Scales come first: they are a multiple of 16 bytes, so the data rows are also aligned to 16 bytes.
      between.scales = intermediate_->data();
      between.scale_kind = ScaleKind::f32;
      auto* const data = static_cast<std::byte*>(intermediate_->data()) + intermediate_scale_bytes(shape, options);
      between.data = data;
      first.output_scale = scale_;
      if (options.intermediate_scaling == OutputScaling::per_row)
        first.scratch = data + static_cast<size_t>(options.max_rows) * dtype_bytes(type, shape.intermediate);
    }
    intermediate_->used_on(static_cast<gpu::Stream>(call.stream));
    in_step(ExpertStep::up, x.rows, call.stream, [&] { gate_up_->run(x, rows, between, first); });
    ExpertRows by_rows = rows;
    by_rows.scale_rows = by_rows.scale_stride = 0;
    in_step(ExpertStep::down, x.rows, call.stream, [&] { down_->run(between, by_rows, y, how); });
  }

  ExpertImpl with_weights(const MoeWeights& weights) const override {
    return std::make_unique<GpuExperts>(shape, weights, options, intermediate_ ? &*intermediate_ : nullptr);
  }
  ExpertMemory memory() const override { return {0, bytes_}; }
  std::string implementation() const override {
    const bool block = options.scaling == ScaleGranularity::block;
    return std::string(to_string(type)) + " wgmma:sm_90a" + (block ? "" : std::string(" ") + to_string(options.scaling));
  }

 private:
  bool is_fp8() const { return type == DType::fp8_e4m3; }

  const size_t bytes_;
  const float* scale_ = nullptr;  // OutputScaling::fixed
  std::optional<GroupedGemm> gate_up_, down_;
  std::optional<gemm::GpuMemory> intermediate_;  // [max_rows, I]
};

}  // namespace

ExpertImpl make_gpu_experts(const ExpertShape& shape, const void* w13, const void* w2, const ExpertOptions& options) {
  const MoeWeights weights{w13, w2, options.w13_scales, options.w2_scales, nullptr, options.intermediate_scale};
  return std::make_unique<GpuExperts>(shape, weights, options, nullptr);
}

}  // namespace switchyard::detail

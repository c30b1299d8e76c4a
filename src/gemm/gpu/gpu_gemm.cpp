// SPDX-License-Identifier: Apache-2.0
#include "gemm/gpu/gpu_gemm.hpp"

#include <algorithm>
#include <string>

#include "arch/gpu_runtime.hpp"
#include "gemm/gpu/gpu_memory.hpp"
#include "gemm/gpu/grouped_params.hpp"
#include "gemm/gpu/kernels.hpp"
#include "gemm/gpu/quantise_rows.hpp"
#include "gemm/gpu/usable_gpu.hpp"
#include "gemm/product_maps.hpp"

namespace switchyard::detail::gemm {
namespace {

static_assert(kMaxExperts == kMaxGemmExperts);

constexpr const char* kClass = "GroupedGemm";

void check(gpu::Status status, const char* what) { check_gpu(status, kClass, what); }

/// True if the kernels of the product write fp8 outputs. With per_row, a second step quantizes their bf16 outputs.
bool kernel_quantises(const GroupedGemmConfig& c) {
  return c.quantize != ScaleKind::none && c.output_scaling != OutputScaling::per_row;
}
Finish finish_of(const GroupedGemmConfig& c) {
  if (c.epilogue != Epilogue::swiglu) return c.epilogue == Epilogue::none ? Finish::plain : Finish::activated;
  return kernel_quantises(c) ? Finish::quantised : Finish::gated;
}

GroupedKernel kernel_for(const GroupedGemmConfig& c) {
  const Finish finish = finish_of(c);
  if (c.dtype == DType::fp8_e4m3)
    return c.scaling == ScaleGranularity::block ? kernel_fp8(finish) : kernel_fp8_channel(finish, c.scaling);
  if (c.dtype == DType::f16) return c.order == WeightOrder::nk ? kernel_f16_nk(finish) : kernel_f16_kn(finish);
  return c.order == WeightOrder::nk ? kernel_bf16_nk(finish) : kernel_bf16_kn(finish);
}

GroupedKernel wide_kernel_for(const GroupedGemmConfig& c) {
  const Finish finish = finish_of(c);
  if (c.scaling != ScaleGranularity::block) return kernel_fp8_channel_wide(finish, c.scaling);
  return kernel_fp8_wide(finish, c.accumulate == Accumulate::fast);
}

class GpuGemm final : public GroupedGemm::Impl {
 public:
  GpuGemm(const GroupedGemmConfig& c, const void* weights, const void* weight_scales)
      : traits_(usable_gpu(kClass, &device_)), kernel_(kernel_for(c)), fp8_(c.dtype == DType::fp8_e4m3) {
    config = c;
    params_.tickets = static_cast<uint32_t*>(tickets_.data());
    params_.num_experts = c.num_experts;
    params_.columns = static_cast<int>(c.columns());
    const bool gated = c.epilogue == Epilogue::swiglu;
    const int64_t in_tile = gated ? kTileColumns / 2 : kTileColumns;
    params_.column_tiles = static_cast<int>((c.columns() + in_tile - 1) / in_tile);
    params_.inner_blocks = static_cast<int>((c.k + inner() - 1) / inner());
    if (!fp8_) params_.inner_blocks = std::max(3, params_.inner_blocks);
    params_.gate_rows = static_cast<int>(c.n / 2);
    params_.shared_bytes = static_cast<uint32_t>(traits_.shared_bytes);
    params_.shared_base = static_cast<uint32_t>(traits_.reserved_bytes);
    params_.activation = c.epilogue == Epilogue::silu ? Activation::silu : Activation::relu;
    params_.gating = {c.swiglu.limit, c.swiglu.alpha, c.swiglu.up_shift};
    params_.scales.weights = static_cast<const std::byte*>(weight_scales);
    params_.scales.weights_ue8m0 = c.weight_scales == ScaleKind::ue8m0;
    params_.scales.weight_rows = static_cast<int>(c.scaling != ScaleGranularity::block ? c.n
                                                  : gated                              ? 2 * num_scales(c.n / 2)
                                                                                       : num_scales(c.n));
    check(kernel_.prepare(traits_.shared_bytes), "kernel");
    maps().set_weights(params_, weights);
    if (!fp8_) return;
    wide_kernel_ = wide_kernel_for(c);
    check(wide_kernel_.prepare(traits_.shared_bytes), "kernel");
    if (c.output_scaling == OutputScaling::per_row) check(load_quantise_rows(), "kernel");
    maps().set_many_weights(params_, weights, kTileColumns / 2);
  }

  void run(const ConstRows& x, const ExpertRows& rows, const Rows& out, const GroupedGemmOptions& options) override {
    const int blocks = blocks_of_call(kClass, device_, traits_, options);
    const int64_t end = std::min(x.rows, out.rows), max_tiles = (end / max_rows() + config.num_experts) * params_.column_tiles;
    if (max_tiles > kMaxTiles) {
      throw Error(ErrorCode::invalid_argument, "GroupedGemm: " + std::to_string(end) + " rows of " +
                                                   std::to_string(config.columns()) + " columns: more than " +
                                                   std::to_string(kMaxTiles) + " tiles; give fewer rows");
    }
    if (x.data != x_.data || x.rows != x_.rows) map_rows(x);
    Rows written = out;
    if (config.output_scaling == OutputScaling::per_row) written.data = options.scratch;
    if (kernel_quantises(config))
      set_quantised(out, options.output_scale);
    else if (written.data != out_.data || written.rows != out_.rows)
      map_outputs(written);
    if (fp8_) set_scales(x, rows);
    params_.ranges = row_ranges(rows, end);
    const auto stream = static_cast<gpu::Stream>(options.stream);
    tickets_.used_on(stream);
    launch(blocks, stream);
    if (config.output_scaling != OutputScaling::per_row) return;
    const RowQuantising of{written.data, end, out.cols, out.data, static_cast<float*>(out.scales)};
    check(quantise_rows(of, params_.ranges, config.num_experts, blocks, stream), "launch");
  }

 private:
  /// For fp8, separate kernels process experts with few and with many rows; each kernel is launched if such experts are
  /// possible. The kernel for many rows requires two multiprocessors.
  void launch(int blocks, gpu::Stream stream) {
    const RowRanges& r = params_.ranges;
    const bool many = fp8_ && blocks > 1 && (r.first_row != nullptr ? r.end : std::min(r.end, r.rows_per_expert)) > kFewFp8Rows;
    params_.max_rows = max_rows();
    const auto part = [&](const GroupedKernel& kernel, const gpu::Grid& grid, int64_t min, int64_t max) {
      params_.min = min;
      params_.max = max;
      check(kernel.launch(grid, stream, params_), "launch");
    };
    part(kernel_, {blocks, kThreads, params_.shared_bytes}, 1, many ? kFewFp8Rows : INT64_MAX);
    if (many) part(wide_kernel_, {blocks / 2 * 2, kThreads, params_.shared_bytes}, kFewFp8Rows + 1, INT64_MAX);
  }

  static constexpr int64_t kMaxTiles = int64_t{1} << 30;  // tickets are 31-bit numbers

  /// Maximum rows per tile of `kernel_`, the kernel with the most columns and the fewest rows per tile.
  int max_rows() const { return fp8_ ? kMaxFp8Rows : kMaxRows; }
  /// Elements of the inner dimension per stage.
  uint32_t inner() const { return fp8_ ? kFp8Inner : kInner; }

  ProductMaps maps() const {
    return {kClass,
            config.dtype,
            kernel_quantises(config) ? config.out_dtype()
            : fp8_                   ? DType::bf16
                                     : config.dtype,
            config.num_experts,
            config.n,
            config.k,
            config.epilogue == Epilogue::swiglu,
            config.order == WeightOrder::kn};
  }
  void map_rows(const ConstRows& x) {
    x_ = {};  // until all maps are made
    const ProductMaps made = maps();
    made.set_rows(params_, x.data, x.rows, max_rows(), made.row_bytes());
    x_ = x;
  }
  void map_outputs(const Rows& out) {
    out_ = {};  // until all maps are made
    maps().set_outputs(params_, out.data, out.rows);
    out_ = out;
  }

  void set_quantised(const Rows& out, const float* fixed) {
    params_.quantised.rows = static_cast<std::byte*>(out.data);
    params_.quantised.scales = static_cast<std::byte*>(out.scales);
    params_.quantised.row = static_cast<int64_t>(scale_row_bytes(out.cols, out.scale_kind));
    params_.quantised.ue8m0 = out.scale_kind == ScaleKind::ue8m0;
    params_.quantised.block = params_.quantised.ue8m0 ? 1 : 4;
    params_.quantised.fixed = fixed;
    if (fixed != nullptr) params_.quantised.row = sizeof(float);
  }
  void set_scales(const ConstRows& x, const ExpertRows& rows) {
    Fp8Scales& s = params_.scales;
    s.rows = static_cast<const std::byte*>(x.scales);
    s.ue8m0 = x.scale_kind == ScaleKind::ue8m0;
    s.rows_of_expert = rows.scale_rows > 0;
    if (!s.rows_of_expert) {
      const bool per_row = config.scaling == ScaleGranularity::per_channel;
      s.row =
          per_row ? std::max<int64_t>(rows.scale_stride, 1) * 4 : static_cast<int64_t>(scale_row_bytes(x.cols, x.scale_kind));
      s.block = s.ue8m0 ? 1 : 4;
      s.packed = 0;
      s.expert = 0;
      return;
    }
    constexpr int64_t kWord = 4;
    s.row = kWord;
    s.block = rows.scale_rows * kWord;
    s.packed = s.ue8m0 ? 2 : 0;
    s.expert = (num_scales(x.cols) + (1 << s.packed) - 1) / (1 << s.packed) * s.block;
  }

  int device_ = -1;
  gpu::DeviceTraits traits_;
  GroupedKernel kernel_;
  GroupedKernel wide_kernel_{};  // fp8
  bool fp8_;
  GpuMemory tickets_{kClass, 2 * sizeof(uint32_t)};  // two counters, 0 while no call runs
  GroupedParams params_;
  ConstRows x_, out_;  // operands of the current maps
};

}  // namespace

std::unique_ptr<GroupedGemm::Impl> make_grouped_gemm(const GroupedGemmConfig& config, const void* weights,
                                                     const void* weight_scales) {
  return std::make_unique<GpuGemm>(config, weights, weight_scales);
}

}  // namespace switchyard::detail::gemm

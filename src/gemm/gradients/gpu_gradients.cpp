// SPDX-License-Identifier: Apache-2.0
#include "gemm/gradients/gpu_gradients.hpp"

#include <algorithm>
#include <string>

#include "arch/gpu_tensor_map.hpp"
#include "gemm/gpu/gpu_memory.hpp"
#include "gemm/gpu/usable_gpu.hpp"
#include "gemm/gradients/gradient_params.hpp"

namespace switchyard::detail::gemm {
namespace {

class GpuWeightGradient final : public WeightGradient::Impl {
 public:
  explicit GpuWeightGradient(const WeightGradientConfig& c)
      : traits_(usable_gpu(kWhere, &device_)),
        kernel_(c.dtype == DType::f16 ? weight_gradient_f16(c.out_dtype == DType::f32, c.add)
                                      : weight_gradient_bf16(c.out_dtype == DType::f32, c.add)) {
    config = c;
    params_.tickets = static_cast<uint32_t*>(tickets_.data());
    params_.num_experts = c.num_experts;
    params_.n = static_cast<int>(c.n);
    params_.k = static_cast<int>(c.k);
    params_.tiles_n = gradient_tiles_n(c.n);
    params_.tiles_k = gradient_tiles_k(c.k);
    params_.shared_bytes = static_cast<uint32_t>(traits_.shared_bytes);
    params_.num_stages = fitting_stages(params_.shared_bytes, c.num_experts);
    const int64_t tiles = static_cast<int64_t>(params_.tiles_n) * params_.tiles_k * c.num_experts;
    if (tiles > kMaxTiles) {
      throw Error(ErrorCode::invalid_argument, std::string(kWhere) + ": " + std::to_string(c.num_experts) + " experts of " +
                                                   std::to_string(c.n) + " x " + std::to_string(c.k) + ": more than " +
                                                   std::to_string(kMaxTiles) + " tiles; give fewer experts");
    }
    check_gpu(kernel_.prepare(traits_.shared_bytes), kWhere, "kernel");
  }

  void run(const ConstRows& dy, const ConstRows& x, const ExpertRows& rows, void* dw,
           const GroupedGemmOptions& options) override {
    const int blocks = blocks_of_call(kWhere, device_, traits_, options);
    map(&params_.dy, &dy_, dy, "dy");
    map(&params_.x, &x_, x, "x");
    params_.ranges = row_ranges(rows, std::min(dy.rows, x.rows));
    params_.end = static_cast<int>(std::max(dy.rows, x.rows));
    if (dw != dw_) map_gradients(dw);
    tickets_.used_on(static_cast<gpu::Stream>(options.stream));
    const gpu::Grid grid{blocks, kThreads, params_.shared_bytes};
    check_gpu(kernel_.launch(grid, static_cast<gpu::Stream>(options.stream), params_), kWhere, "launch");
  }

 private:
  static constexpr const char* kWhere = kWeightGradientObject;
  static constexpr int64_t kMaxTiles = int64_t{1} << 30;  // tickets are 31-bit numbers

  /// `mapped` contains the rows of the current map. Without rows, there is nothing to map, and the kernel reads nothing.
  void map(CUtensorMap* map, ConstRows* mapped, const ConstRows& rows, const char* name) const {
    if (rows.rows == 0 || (rows.data == mapped->data && rows.rows == mapped->rows)) return;
    *mapped = {};
    const auto columns = static_cast<uint64_t>(rows.cols), count = static_cast<uint64_t>(rows.rows);
    const gpu::ElementType type = config.dtype == DType::bf16 ? gpu::ElementType::bf16 : gpu::ElementType::f16;
    if (!gpu::make_tensor_map(map, rows.data, type, {{columns, 0, kChunkColumns}, {count, columns * 2, kStageRows}},
                              gpu::Swizzle::bytes_128)) {
      throw Error(ErrorCode::system, std::string(kWhere) + ": the driver makes no tensor map of " + name);
    }
    *mapped = rows;
  }
  void map_gradients(void* dw) {
    dw_ = nullptr;  // until a map is made
    const auto n = static_cast<uint64_t>(config.n), k = static_cast<uint64_t>(config.k);
    const uint64_t row = dtype_bytes(config.out_dtype, config.k);
    const gpu::ElementType type = config.out_dtype == DType::f32    ? gpu::ElementType::f32
                                  : config.out_dtype == DType::bf16 ? gpu::ElementType::bf16
                                                                    : gpu::ElementType::f16;
    const gpu::Dimension columns{k, 0, static_cast<uint32_t>(8 * kBoxRowBytes / dtype_bits(config.out_dtype))},
        rows{n, row, kBoxRows}, experts{static_cast<uint64_t>(config.num_experts), n * row, 1};
    if (!gpu::make_tensor_map(&params_.dw, dw, type, {columns, rows, experts}, gpu::Swizzle::bytes_128))
      throw Error(ErrorCode::system, std::string(kWhere) + ": the driver makes no tensor map of dw");
    dw_ = dw;
  }

  int device_ = -1;
  gpu::DeviceTraits traits_;
  WeightGradientKernel kernel_;
  GpuMemory tickets_{kWhere, 2 * sizeof(uint32_t)};  // two counters, 0 while no call runs
  WeightGradientParams params_;
  ConstRows dy_, x_;    // operands of the current maps
  void* dw_ = nullptr;  // operand of the current map
};

/// A kernel that processes rows independently, on the GPU that was current at construction.
template <class Params>
class OnRows {
 public:
  OnRows(const char* where, RowKernel<Params> kernel) : where_(where), traits_(usable_gpu(where, &device_)), kernel_(kernel) {
    check_gpu(kernel_.prepare(), where_, "kernel");
  }
  void run(const Params& params, const GroupedGemmOptions& options) const {
    const int blocks = blocks_of_call(where_, device_, traits_, options);
    if (params.ranges.end == 0) return;
    check_gpu(kernel_.launch(blocks, static_cast<gpu::Stream>(options.stream), params), where_, "launch");
  }

 private:
  const char* where_;
  int device_ = -1;
  gpu::DeviceTraits traits_;
  RowKernel<Params> kernel_;
};

class GpuSwigluGradient final : public SwigluGradient::Impl {
 public:
  explicit GpuSwigluGradient(const SwigluGradientConfig& c)
      : kernel_(kSwigluGradientObject, swiglu_gradient_kernel(c.dtype == DType::f16)) {
    config = c;
  }

  void run(const ConstRows& h, const ConstRows& da, const ExpertRows& rows, const Rows& dh, const Rows& a,
           const GroupedGemmOptions& options) override {
    SwigluGradientParams p;
    const int64_t end = std::min({h.rows, da.rows, dh.rows});
    p.ranges = row_ranges(rows, a.data != nullptr ? std::min(end, a.rows) : end);
    p.h = h.data;
    p.da = da.data;
    p.dh = dh.data;
    p.a = a.data;
    p.gating = {config.swiglu.limit, config.swiglu.alpha, config.swiglu.up_shift};
    p.num_experts = config.num_experts;
    p.columns = static_cast<int>(config.columns);
    kernel_.run(p, options);
  }

 private:
  OnRows<SwigluGradientParams> kernel_;
};

class GpuRoutingGradient final : public RoutingGradient::Impl {
 public:
  explicit GpuRoutingGradient(const RoutingGradientConfig& c)
      : kernel_(kRoutingGradientObject, routing_gradient_kernel(c.dtype == DType::f16)) {
    config = c;
  }

  void run(const ConstRows& dy, const ConstRows& y, const ExpertRows& rows, float* dweight,
           const GroupedGemmOptions& options) override {
    RoutingGradientParams p;
    p.ranges = row_ranges(rows, std::min(dy.rows, y.rows));
    p.dy = dy.data;
    p.y = y.data;
    p.dweight = dweight;
    p.num_experts = config.num_experts;
    p.columns = static_cast<int>(config.columns);
    kernel_.run(p, options);
  }

 private:
  OnRows<RoutingGradientParams> kernel_;
};

}  // namespace

std::unique_ptr<WeightGradient::Impl> make_weight_gradient(const WeightGradientConfig& config) {
  return std::make_unique<GpuWeightGradient>(config);
}
std::unique_ptr<SwigluGradient::Impl> make_swiglu_gradient(const SwigluGradientConfig& config) {
  return std::make_unique<GpuSwigluGradient>(config);
}
std::unique_ptr<RoutingGradient::Impl> make_routing_gradient(const RoutingGradientConfig& config) {
  return std::make_unique<GpuRoutingGradient>(config);
}

}  // namespace switchyard::detail::gemm

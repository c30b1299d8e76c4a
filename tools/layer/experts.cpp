// SPDX-License-Identifier: Apache-2.0
#include "layer/experts.hpp"

#include <cmath>

#include "oracle/numbers.hpp"
#include "run/index.hpp"

namespace switchyard::tool {
namespace {

/// Options for experts on the host. Routes are not needed, because forward_rank_major is not called.
ExpertOptions host_options() {
  ExpertOptions o;
  o.route_scratch_bytes = 0;
  return o;
}

/// See "Weights for demonstrations" in docs/expert.md.
measure::WeightForm form_of(uint64_t seed, uint64_t matrix, double amplitude) {
  measure::WeightForm form;
  form.key = measure::mix_weight_key(seed + matrix * 0x9E3779B97F4A7C15u);
  for (int i = 0; i < measure::WeightForm::kLevels; ++i)
    oracle::store(kLayerType, form.levels, i, static_cast<float>(amplitude * (static_cast<double>(2 * i - 255) / 255)));
  return form;
}

measure::Fp8WeightForm fp8_form_of(const measure::WeightForm& from) {
  measure::Fp8WeightForm form;
  form.key = from.key;
  const auto level = [&](int i) { return oracle::load(kLayerType, from.levels, i); };
  for (int s = 0; s < measure::Fp8WeightForm::kScales; ++s) {
    constexpr float kLargestE4m3 = 448;
    const float times = 1 + static_cast<float>(s) / measure::Fp8WeightForm::kScales;
    form.scales[s] = level(measure::WeightForm::kLevels - 1) / kLargestE4m3 * times;
    for (int i = 0; i < measure::WeightForm::kLevels; ++i)
      oracle::store(DType::fp8_e4m3, form.codes[s], i, level(i) / form.scales[s]);
  }
  return form;
}

/// Type of the weights and of the input rows of the products.
DType type_of(const LayerArithmetic& numbers) { return numbers.fp8() ? DType::fp8_e4m3 : kLayerType; }
/// Kind of the scales of the rows between the products, as in a MoeLayer.
ScaleKind between_scales(const LayerArithmetic& numbers) { return numbers.fp8() ? ScaleKind::f32 : ScaleKind::none; }
/// Size of a row's scales between the products.
size_t between_scale_bytes(int64_t intermediate, const LayerArithmetic& numbers) {
  return numbers.intermediate_scaling == OutputScaling::per_group ? scale_row_bytes(intermediate, between_scales(numbers))
                                                                  : sizeof(float);
}
/// Size of a row between the products without its scales, and with its bf16 values for OutputScaling::per_row.
size_t between_bytes(int64_t intermediate, const LayerArithmetic& numbers) {
  const bool bf16 = numbers.intermediate_scaling == OutputScaling::per_row;
  return dtype_bytes(type_of(numbers), intermediate) + (bf16 ? dtype_bytes(kLayerType, intermediate) : 0);
}

measure::Fp8WeightSize up_size(const ExpertShape& shape, const LayerArithmetic& numbers) {
  return {shape.num_local_experts, 2 * shape.intermediate, shape.hidden, shape.intermediate,
          numbers.scaling != ScaleGranularity::block};
}
measure::Fp8WeightSize down_size(const ExpertShape& shape, const LayerArithmetic& numbers) {
  return {shape.num_local_experts, shape.hidden, shape.intermediate, shape.hidden, numbers.scaling != ScaleGranularity::block};
}

}  // namespace

WeightForms weight_forms(uint64_t seed, int64_t hidden, int64_t intermediate) {
  return {form_of(seed, 13, std::sqrt(3.0 / static_cast<double>(hidden))),
          form_of(seed, 2, std::sqrt(3.0 / (0.3557 * static_cast<double>(intermediate))))};
}

Fp8WeightForms fp8_weight_forms(uint64_t seed, int64_t hidden, int64_t intermediate) {
  const WeightForms forms = weight_forms(seed, hidden, intermediate);
  return {fp8_form_of(forms.gate_up), fp8_form_of(forms.down)};
}

void write_weights(const ExpertShape& shape, int first_expert, uint64_t seed, void* w13, void* w2, RankDevice& device) {
  const int64_t experts = shape.num_local_experts, h = shape.hidden, width = shape.intermediate;
  const WeightForms forms = weight_forms(seed, h, width);
  measure::write_expert_weights(forms.gate_up, first_expert, experts, 2 * width, h, w13, device.stream());
  measure::write_expert_weights(forms.down, first_expert, experts, h, width, w2, device.stream());
}

LayerExperts::LayerExperts(const ExpertShape& shape, int first_expert, uint64_t seed, int64_t max_rows,
                           const LayerArithmetic& arithmetic, int world, RankDevice& device)
    : shape_(shape), arithmetic_(arithmetic), device_(device), sms_(device.sms_of_products(world)) {
  if (device.on_host()) {
    if (max_rows == 0) return;
    mlp_.emplace(shape, ExpertWeights(seed, shape.hidden, shape.intermediate).source(first_expert), host_options());
    return;
  }
  if (arithmetic.intermediate_scaling == OutputScaling::fixed)
    intermediate_scale_ = device.upload(&kIntermediateScale, sizeof(float));
  if (shape.num_local_experts == 0) return;
  weights_ = arithmetic.fp8() ? make_fp8_weights(first_expert, seed) : make_weights(first_expert, seed);
  const int64_t width = shape.intermediate;
  between_ = {device.allocate(dtype_bytes(type_of(arithmetic), max_rows * width)),
              max_rows,
              width,
              type_of(arithmetic),
              device.allocate(at(max_rows) * between_scale_bytes(width, arithmetic)),
              between_scales(arithmetic)};
  if (arithmetic.intermediate_scaling == OutputScaling::per_row)
    scratch_ = device.allocate(dtype_bytes(kLayerType, max_rows * width));
  if (max_rows > 0) make_products(weights_);
  device.wait();
}

size_t LayerExperts::device_bytes(const ExpertShape& shape, int64_t max_rows, const LayerArithmetic& arithmetic,
                                  Backend backend) {
  if (backend == Backend::cpu) return max_rows > 0 ? ExpertMlp::memory_required(shape, host_options()).total() : 0;
  const int64_t experts = shape.num_local_experts, h = shape.hidden, width = shape.intermediate;
  const size_t bytes =
      dtype_bytes(type_of(arithmetic), experts * 3 * h * width) +
      at(max_rows) * (between_bytes(width, arithmetic) + (arithmetic.fp8() ? between_scale_bytes(width, arithmetic) : 0));
  if (!arithmetic.fp8()) return bytes;
  return bytes + at(experts * (up_size(shape, arithmetic).scales() + down_size(shape, arithmetic).scales())) * sizeof(float);
}

LayerExperts::BothWeights LayerExperts::make_weights(int first_expert, uint64_t seed) {
  const int64_t elements = shape_.num_local_experts * shape_.hidden * shape_.intermediate;
  const BothWeights made{{device_.allocate(dtype_bytes(kLayerType, 2 * elements))},
                         {device_.allocate(dtype_bytes(kLayerType, elements))}};
  write_weights(shape_, first_expert, seed, made.up.data, made.down.data, device_);
  return made;
}

LayerExperts::BothWeights LayerExperts::make_fp8_weights(int first_expert, uint64_t seed) {
  const Fp8WeightForms forms = fp8_weight_forms(seed, shape_.hidden, shape_.intermediate);
  const auto make = [&](const measure::Fp8WeightForm& form, const measure::Fp8WeightSize& size) {
    Weights made;
    made.data = device_.allocate(at(size.num_experts * size.rows * size.cols));
    made.scales = static_cast<float*>(device_.allocate(at(size.num_experts * size.scales()) * sizeof(float)));
    measure::write_fp8_expert_weights(form, first_expert, size, made.data, made.scales, device_.stream());
    return made;
  };
  return {make(forms.gate_up, up_size(shape_, arithmetic_)), make(forms.down, down_size(shape_, arithmetic_))};
}

void LayerExperts::make_products(const BothWeights& weights) {
  GroupedGemmConfig config;
  config.num_experts = shape_.num_local_experts;
  config.dtype = type_of(arithmetic_);
  config.n = 2 * shape_.intermediate;
  config.k = shape_.hidden;
  config.epilogue = Epilogue::swiglu;
  config.quantize = between_scales(arithmetic_);
  config.accumulate = arithmetic_.accumulate;
  config.scaling = arithmetic_.scaling;
  config.output_scaling = arithmetic_.intermediate_scaling;
  up_.emplace(config, weights.up.data, weights.up.scales);
  config.n = shape_.hidden;
  config.k = shape_.intermediate;
  config.epilogue = Epilogue::none;
  config.quantize = ScaleKind::none;
  config.scaling = arithmetic_.down_scaling();
  config.output_scaling = OutputScaling::per_group;
  down_.emplace(config, weights.down.data, weights.down.scales);
}

Rows LayerExperts::between(int64_t rows) const {
  Rows some = between_;
  some.rows = rows;
  return some;
}

void LayerExperts::up(const ConstRows& x, const ExpertRows& rows) {
  if (up_) up_->run(x, rows, between(x.rows), {device_.stream(), sms_, intermediate_scale_, scratch_});
}

void LayerExperts::down(const ExpertRows& rows, const Rows& y) {
  if (!down_) return;
  ExpertRows by_rows = rows;
  by_rows.scale_rows = by_rows.scale_stride = 0;  // the delivered scales' order does not apply to rows between the products
  down_->run(between(y.rows), by_rows, y, {device_.stream(), sms_});
}

void LayerExperts::forward(const ConstRows& x, const ExpertRows& rows, const Rows& y) {
  if (mlp_) return mlp_->forward(x, rows, y);
  up(x, rows);
  down(rows, y);
}

}  // namespace switchyard::tool

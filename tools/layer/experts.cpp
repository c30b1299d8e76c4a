// SPDX-License-Identifier: Apache-2.0
#include "layer/experts.hpp"

#include <cmath>
#include <span>

#include "oracle/numbers.hpp"
#include "run/index.hpp"

namespace switchyard::tool {
namespace {

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

LayerWeights::LayerWeights(const ExpertShape& shape, int first_expert, uint64_t seed, const LayerArithmetic& arithmetic,
                           RankDevice& device) {
  if (device.on_host()) {
    fill(shape, first_expert, seed);
    return;
  }
  if (arithmetic.intermediate_scaling == OutputScaling::fixed)
    intermediate_scale_ = device.upload(&kIntermediateScale, sizeof(float));
  if (shape.num_local_experts == 0) return;
  if (!arithmetic.fp8()) {
    const int64_t elements = shape.num_local_experts * shape.hidden * shape.intermediate;
    void* const up = device.allocate(dtype_bytes(kLayerType, 2 * elements));
    void* const down = device.allocate(dtype_bytes(kLayerType, elements));
    write_weights(shape, first_expert, seed, up, down, device);
    up_.data = up;
    down_.data = down;
  } else {
    const Fp8WeightForms forms = fp8_weight_forms(seed, shape.hidden, shape.intermediate);
    const auto make = [&](const measure::Fp8WeightForm& form, const measure::Fp8WeightSize& size) {
      void* const data = device.allocate(at(size.num_experts * size.rows * size.cols));
      auto* const scales = static_cast<float*>(device.allocate(at(size.num_experts * size.scales()) * sizeof(float)));
      measure::write_fp8_expert_weights(form, first_expert, size, data, scales, device.stream());
      return Matrices{data, scales};
    };
    up_ = make(forms.gate_up, up_size(shape, arithmetic));
    down_ = make(forms.down, down_size(shape, arithmetic));
  }
  device.wait();
}

size_t LayerWeights::device_bytes(const ExpertShape& shape, const LayerArithmetic& arithmetic) {
  const int64_t experts = shape.num_local_experts, elements = experts * 3 * shape.hidden * shape.intermediate;
  if (!arithmetic.fp8()) return dtype_bytes(kLayerType, elements);
  return at(elements) +
         at(experts * (up_size(shape, arithmetic).scales() + down_size(shape, arithmetic).scales())) * sizeof(float);
}

void LayerWeights::set_scales(MoeLayerConfig& config) const {
  config.w13_scales = up_.scales;
  config.w2_scales = down_.scales;
  config.intermediate_scale = intermediate_scale_;
}

void LayerWeights::fill(const ExpertShape& shape, int first_expert, uint64_t seed) {
  const size_t each = at(shape.hidden * shape.intermediate), experts = at(shape.num_local_experts);
  gate_up_on_host_.resize(2 * each * experts);
  down_on_host_.resize(each * experts);
  const ExpertWeights weights(seed, shape.hidden, shape.intermediate);
  for (size_t e = 0; e < experts; ++e)
    weights.fill(first_expert + static_cast<int64_t>(e), std::span(gate_up_on_host_).subspan(2 * each * e, 2 * each),
                 std::span(down_on_host_).subspan(each * e, each));
  up_.data = gate_up_on_host_.data();
  down_.data = down_on_host_.data();
}

}  // namespace switchyard::tool

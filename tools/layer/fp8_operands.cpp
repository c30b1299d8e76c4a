// SPDX-License-Identifier: Apache-2.0
#include "layer/fp8_operands.hpp"

#include <algorithm>
#include <cmath>

#include "oracle/numbers.hpp"
#include "oracle/rows.hpp"
#include "run/index.hpp"

namespace switchyard::tool {
namespace {

/// Scale for a group whose maximum magnitude is this bf16 value.
float scale_of(float largest, ScaleKind kind) {
  uint16_t row = 0;
  uint8_t code = 0;
  oracle::store(DType::bf16, &row, 0, largest);
  alignas(4) std::byte scales[16];
  oracle::quantise(DType::bf16, &row, 1, kind, &code, scales);
  return oracle::scale_value(kind, scales, 0);
}

float dequantised(float magnitude, float scale) {
  return scale == 0 ? 0 : oracle::rounded(DType::fp8_e4m3, magnitude / scale) * scale;
}
/// With a scale given by the caller, values are multiplied by its inverse.
float dequantised_fixed(float value, float scale) { return oracle::rounded(DType::fp8_e4m3, value * (1.0f / scale)) * scale; }

}  // namespace

RowScales token_scales(const LayerArithmetic& numbers, int64_t hidden) {
  return {numbers.quantize, numbers.scaling == ScaleGranularity::per_channel ? hidden : kScaleGroup};
}

RowScales between_scales(const LayerArithmetic& numbers, int64_t intermediate) {
  if (numbers.intermediate_scaling == OutputScaling::fixed) return {ScaleKind::f32, intermediate, kIntermediateScale};
  return {ScaleKind::f32, numbers.intermediate_scaling == OutputScaling::per_row ? intermediate : kScaleGroup};
}

void quantised(const uint16_t* row, int64_t cols, const RowScales& scales, float* out) {
  if (scales.fixed != 0) {
    for (int64_t c = 0; c < cols; ++c) out[c] = dequantised_fixed(oracle::load(DType::bf16, row, c), scales.fixed);
    return;
  }
  std::vector<uint8_t> codes(at(cols));
  const auto group = static_cast<int>(scales.group);
  std::vector<std::byte> values(scale_row_bytes(cols, scales.kind, group));
  oracle::quantise(DType::bf16, row, cols, scales.kind, codes.data(), values.data(), group);
  for (int64_t c = 0; c < cols; ++c)
    out[c] = oracle::load(DType::fp8_e4m3, codes.data(), c) * oracle::scale_value(scales.kind, values.data(), c / scales.group);
}

void quantised_range(const float* row, const float* by, int64_t cols, const RowScales& scales, float* range) {
  std::vector<float> low(at(scales.group)), high(at(scales.group));
  for (int64_t begin = 0; begin < cols; begin += scales.group) {
    const int64_t count = std::min<int64_t>(scales.group, cols - begin);
    for (int64_t i = 0; i < count; ++i) {
      const float magnitude = std::fabs(row[begin + i]);
      low[at(i)] = oracle::rounded(DType::bf16, std::max(0.0f, magnitude - by[begin + i]));
      high[at(i)] = oracle::rounded(DType::bf16, magnitude + by[begin + i]);
    }
    const auto scale = [&](const std::vector<float>& group) {
      return scale_of(*std::max_element(group.begin(), group.begin() + count), scales.kind);
    };
    const bool fixed = scales.fixed != 0;
    const float min_scale = fixed ? scales.fixed : scale(low), max_scale = fixed ? scales.fixed : scale(high);
    for (int64_t i = 0; i < count; ++i) {
      if (fixed) {
        range[begin + i] = dequantised_fixed(high[at(i)], max_scale) - dequantised_fixed(low[at(i)], min_scale);
        continue;
      }
      const auto [min, max] = std::minmax({dequantised(low[at(i)], min_scale), dequantised(low[at(i)], max_scale),
                                           dequantised(high[at(i)], min_scale), dequantised(high[at(i)], max_scale)});
      range[begin + i] = max - min;
    }
  }
}

Fp8Values::Fp8Values(const measure::WeightForm& from, const measure::Fp8WeightForm& form) : values_(kScales * kAll) {
  for (size_t s = 0; s < kScales; ++s)
    for (int i = 0; i < measure::WeightForm::kLevels; ++i)
      values_[s * kAll + from.levels[i]] = oracle::load(DType::fp8_e4m3, form.codes[s], i) * form.scales[s];
}

Fp8Experts::Fp8Experts(int64_t hidden, int64_t intermediate)
    : gate_up(weight_forms(0, hidden, intermediate).gate_up, fp8_weight_forms(0, hidden, intermediate).gate_up),
      down(weight_forms(0, hidden, intermediate).down, fp8_weight_forms(0, hidden, intermediate).down) {}

}  // namespace switchyard::tool

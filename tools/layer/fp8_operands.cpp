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

}  // namespace

void quantised(const uint16_t* row, int64_t cols, ScaleKind kind, float* out) {
  std::vector<uint8_t> codes(at(cols));
  std::vector<std::byte> scales(scale_row_bytes(cols, kind));
  oracle::quantise(DType::bf16, row, cols, kind, codes.data(), scales.data());
  for (int64_t c = 0; c < cols; ++c)
    out[c] = oracle::load(DType::fp8_e4m3, codes.data(), c) * oracle::scale_value(kind, scales.data(), c / kScaleGroup);
}

void quantised_range(const float* row, const float* by, int64_t cols, ScaleKind kind, float* range) {
  for (int64_t begin = 0; begin < cols; begin += kScaleGroup) {
    const int64_t count = std::min<int64_t>(kScaleGroup, cols - begin);
    float low[kScaleGroup] = {}, high[kScaleGroup] = {};
    for (int64_t i = 0; i < count; ++i) {
      const float magnitude = std::fabs(row[begin + i]);
      low[i] = oracle::rounded(DType::bf16, std::max(0.0f, magnitude - by[begin + i]));
      high[i] = oracle::rounded(DType::bf16, magnitude + by[begin + i]);
    }
    const float scales[] = {scale_of(*std::max_element(low, low + count), kind),
                            scale_of(*std::max_element(high, high + count), kind)};
    for (int64_t i = 0; i < count; ++i) {
      const auto [min, max] = std::minmax({dequantised(low[i], scales[0]), dequantised(low[i], scales[1]),
                                           dequantised(high[i], scales[0]), dequantised(high[i], scales[1])});
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

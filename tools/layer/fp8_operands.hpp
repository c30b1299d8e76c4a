// SPDX-License-Identifier: Apache-2.0
// Values represented by an fp8 layer's operands, computed on the host for the single-rank reference.
#pragma once

#include <cstdint>
#include <vector>

#include "layer/experts.hpp"

namespace switchyard::tool {

/// Scales of a row: one per `group` columns, each amax / 448, or the same for all elements.
struct RowScales {
  ScaleKind kind = ScaleKind::f32;
  int64_t group = kScaleGroup;
  float fixed = 0;  ///< if not 0: the scale of all elements; larger values saturate
};
/// Scales of a layer's tokens, [H], and of its rows between the products, [I].
RowScales token_scales(const LayerArithmetic& numbers, int64_t hidden);
RowScales between_scales(const LayerArithmetic& numbers, int64_t intermediate);

/// Values of a bf16 row after quantization, each of which is a code times a scale.
void quantised(const uint16_t* row, int64_t cols, const RowScales& scales, float* out);
/// Maximum change in the value represented by an element after rounding to bf16 and quantization if each element changes by
/// `by`. An element near the boundary between two codes can change; a whole group can change if its maximum is near the
/// boundary between two bf16 values.
void quantised_range(const float* row, const float* by, int64_t cols, const RowScales& scales, float* range);

/// Values of an fp8 weight matrix for each scale, indexed by the original bf16 value.
class Fp8Values {
 public:
  Fp8Values(const measure::WeightForm& from, const measure::Fp8WeightForm& form);
  /// The values of a block, indexed by the original bf16 value.
  const float* of(int64_t expert, int64_t block_row, int64_t block_col) const {
    return &values_[static_cast<size_t>(measure::weight_scale_of(expert, block_row, block_col)) * kAll];
  }

 private:
  static constexpr size_t kScales = measure::Fp8WeightForm::kScales, kAll = size_t{1} << 16;
  std::vector<float> values_;
};
/// Both of the experts' matrices. The seed determines only the position of each value.
struct Fp8Experts {
  Fp8Experts(int64_t hidden, int64_t intermediate);
  Fp8Values gate_up, down;
};

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// Values that the operands of an fp8 layer represent, on the host, for the single-rank reference.
#pragma once

#include <cstdint>
#include <vector>

#include "layer/experts.hpp"

namespace switchyard::tool {

/// Values of a bf16 row after quantization: code times scale.
void quantised(const uint16_t* row, int64_t cols, ScaleKind kind, float* out);
/// How far the value that an element represents after rounding to bf16 and quantization may move if each element moves by `by`.
/// It moves for an element near the boundary between two codes, and for a whole group if its maximum is near the boundary
/// between two bf16 values.
void quantised_range(const float* row, const float* by, int64_t cols, ScaleKind kind, float* range);

/// Values of the fp8 weights of a matrix: for each scale, by the bf16 value from which they are made.
class Fp8Values {
 public:
  Fp8Values(const measure::WeightForm& from, const measure::Fp8WeightForm& form);
  /// The values of a block, by bf16 value.
  const float* of(int64_t expert, int64_t block_row, int64_t block_col) const {
    return &values_[static_cast<size_t>(measure::weight_scale_of(expert, block_row, block_col)) * kAll];
  }

 private:
  static constexpr size_t kScales = measure::Fp8WeightForm::kScales, kAll = size_t{1} << 16;
  std::vector<float> values_;
};
/// Both matrices of experts. The seed only determines the position of each value.
struct Fp8Experts {
  Fp8Experts(int64_t hidden, int64_t intermediate);
  Fp8Values gate_up, down;
};

}  // namespace switchyard::tool

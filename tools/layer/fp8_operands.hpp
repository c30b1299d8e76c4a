// SPDX-License-Identifier: Apache-2.0
// What the operands of a layer in fp8 stand for, on the host, for the single-rank reference.
#pragma once

#include <cstdint>
#include <vector>

#include "layer/experts.hpp"

namespace switchyard::tool {

/// What a bf16 row stands for after it was quantised: code times scale.
void quantised(const uint16_t* row, int64_t cols, ScaleKind kind, float* out);
/// How far an element of a row may move in what it stands for, rounded to bf16 and quantised, if each moves by `by`: an element
/// near the boundary between two codes, or all of a group whose largest is near one between two values of bf16.
void quantised_range(const float* row, const float* by, int64_t cols, ScaleKind kind, float* range);

/// What the fp8 weights of a matrix stand for: of each scale, by the bf16 value that they are made from.
class Fp8Values {
 public:
  Fp8Values(const measure::WeightForm& from, const measure::Fp8WeightForm& form);
  /// The values of a block, by bf16.
  const float* of(int64_t expert, int64_t block_row, int64_t block_col) const {
    return &values_[static_cast<size_t>(measure::weight_scale_of(expert, block_row, block_col)) * kAll];
  }

 private:
  static constexpr size_t kScales = measure::Fp8WeightForm::kScales, kAll = size_t{1} << 16;
  std::vector<float> values_;
};
/// Both matrices of experts, whatever their seed: it decides which value lies where.
struct Fp8Experts {
  Fp8Experts(int64_t hidden, int64_t intermediate);
  Fp8Values gate_up, down;
};

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// The closed form of ExpertWeights (docs/expert.md) for GPUs, which generate gigabytes of weights quickly.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SWITCHYARD_WEIGHT_FN __host__ __device__ inline
#define SWITCHYARD_WEIGHT_MEMBER __host__ __device__
#else
#define SWITCHYARD_WEIGHT_FN inline
#define SWITCHYARD_WEIGHT_MEMBER
#endif

namespace switchyard::measure {

/// One kind of matrix for all experts: gate and up, or down.
struct WeightForm {
  static constexpr int kLevels = 256;
  uint64_t key = 0;          ///< derived from seed and kind
  uint16_t levels[kLevels];  ///< the value that each byte represents
};

SWITCHYARD_WEIGHT_FN uint64_t mix_weight_key(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
SWITCHYARD_WEIGHT_FN uint64_t weight_row_key(uint64_t form_key, int64_t expert, int64_t row) {
  return mix_weight_key(mix_weight_key(form_key + static_cast<uint64_t>(expert)) + static_cast<uint64_t>(row));
}
/// Eight bytes, one for each of columns [8 * group, 8 * group + 8) of a row, lowest column first.
SWITCHYARD_WEIGHT_FN uint64_t weight_bytes(uint64_t row_key, int64_t group) {
  return mix_weight_key(row_key + static_cast<uint64_t>(group + 1) * 0x9E3779B97F4A7C15u);
}

/// The same matrices in e4m3, with one scale per 128 x 128 block or per row. Each scale is one of four, so using a block's or
/// row's scale for the next gives wrong results.
struct Fp8WeightForm {
  static constexpr int kScales = 4;
  static constexpr int64_t kBlock = 128;
  uint64_t key = 0;
  float scales[kScales];
  uint8_t codes[kScales][WeightForm::kLevels];  ///< the value that each byte represents in a block of each scale
};
/// Index of a block's scale; a row that has its own scale is a row of blocks with one block.
SWITCHYARD_WEIGHT_FN int weight_scale_of(int64_t expert, int64_t block_row, int64_t block_col) {
  return static_cast<int>(mix_weight_key(weight_row_key(0, expert, block_row) + static_cast<uint64_t>(block_col)) %
                          Fp8WeightForm::kScales);
}
/// The row of blocks to which a row belongs. A new row of blocks begins after `half_rows` rows, where the up half of gate and
/// up begins.
SWITCHYARD_WEIGHT_FN int64_t weight_block_row(int64_t row, int64_t half_rows) {
  const int64_t half_blocks = (half_rows + Fp8WeightForm::kBlock - 1) / Fp8WeightForm::kBlock;
  return row / half_rows * half_blocks + row % half_rows / Fp8WeightForm::kBlock;
}

/// Enqueues on `stream` (cudaStream_t). Writes [num_experts, rows, cols] bf16 for the experts starting at `first_expert`. `to`
/// is aligned to 16 bytes, cols is a multiple of 8. \throws std::runtime_error
void write_expert_weights(const WeightForm& form, int64_t first_expert, int64_t num_experts, int64_t rows, int64_t cols,
                          void* to, void* stream);

/// The dimensions of a matrix with scales. `half_rows`: number of rows before a new row of blocks begins, either `rows` or half
/// of it. `per_row`: each row has one scale.
struct Fp8WeightSize {
  int64_t num_experts = 0, rows = 0, cols = 0, half_rows = 0;
  bool per_row = false;
  SWITCHYARD_WEIGHT_MEMBER int64_t block_row(int64_t row) const { return per_row ? row : weight_block_row(row, half_rows); }
  SWITCHYARD_WEIGHT_MEMBER int64_t block_col(int64_t col) const { return per_row ? 0 : col / Fp8WeightForm::kBlock; }
  SWITCHYARD_WEIGHT_MEMBER int64_t block_rows() const { return block_row(rows - 1) + 1; }
  SWITCHYARD_WEIGHT_MEMBER int64_t block_cols() const { return block_col(cols - 1) + 1; }
  SWITCHYARD_WEIGHT_MEMBER int64_t scales() const { return block_rows() * block_cols(); }  ///< per expert
};
/// Like write_expert_weights(), for [num_experts, rows, cols] codes and [num_experts, block_rows(), block_cols()] float32
/// scales. \throws std::runtime_error
void write_fp8_expert_weights(const Fp8WeightForm& form, int64_t first_expert, const Fp8WeightSize& size, void* to,
                              float* scales, void* stream);

}  // namespace switchyard::measure

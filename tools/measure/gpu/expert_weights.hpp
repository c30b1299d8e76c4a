// SPDX-License-Identifier: Apache-2.0
// The closed form of ExpertWeights (docs/expert.md) once more, so that a GPU can write gigabytes of weights in a moment.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SWITCHYARD_WEIGHT_FN __host__ __device__ inline
#else
#define SWITCHYARD_WEIGHT_FN inline
#endif

namespace switchyard::measure {

/// The matrices of one kind, of all experts: gate and up, or down.
struct WeightForm {
  static constexpr int kLevels = 256;
  uint64_t key = 0;          ///< of seed and kind
  uint16_t levels[kLevels];  ///< what the values of a byte stand for
};

SWITCHYARD_WEIGHT_FN uint64_t mix_weight_key(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
SWITCHYARD_WEIGHT_FN uint64_t weight_row_key(uint64_t form_key, int64_t expert, int64_t row) {
  return mix_weight_key(mix_weight_key(form_key + static_cast<uint64_t>(expert)) + static_cast<uint64_t>(row));
}
/// Eight bytes, one for each of the columns [8 * group, 8 * group + 8) of a row, the lowest first.
SWITCHYARD_WEIGHT_FN uint64_t weight_bytes(uint64_t row_key, int64_t group) {
  return mix_weight_key(row_key + static_cast<uint64_t>(group + 1) * 0x9E3779B97F4A7C15u);
}

/// Enqueues on `stream` (cudaStream_t): writes [num_experts, rows, cols] bf16 of the experts from `first_expert` on. `to` is a
/// multiple of 16 bytes, cols of 8. \throws std::runtime_error
void write_expert_weights(const WeightForm& form, int64_t first_expert, int64_t num_experts, int64_t rows, int64_t cols,
                          void* to, void* stream);

}  // namespace switchyard::measure

// SPDX-License-Identifier: Apache-2.0
// Closed-form rows: every byte is a function of a key, so any rank can compute the row expected from any other rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "switchyard/types.hpp"

namespace switchyard::tool {

/// Kind of a row, which defines the meaning of the key's other arguments.
enum class RowKind : uint64_t {
  token = 1,          ///< a token's activation: a = rank, b = token
  token_scales = 2,   ///< scales of a token, fp8
  rank_output = 3,    ///< output of rank a's experts for token b of rank c
  expert_output = 4,  ///< output of expert a for route b = token * K + k of rank c
  bias = 5,           ///< a = rank, b = token, c = index of the bias
};

/// Key of a row. `set` distinguishes the data of different calls.
uint64_t row_key(uint64_t seed, uint64_t set, RowKind kind, uint64_t a, uint64_t b, uint64_t c = 0);

/// Fills `hidden` elements with finite values of both signs, with magnitudes in [2^-4, 2) that use all mantissa bits, and with
/// some +0 and -0. fp8: any code that is not NaN.
void fill_row(void* row, DType type, int64_t hidden, uint64_t key);
/// Fills a scale row of scale_row_bytes(hidden, kind) with normal values, including the padding (the payload is opaque to a
/// dispatch).
void fill_scales(void* row, int64_t hidden, ScaleKind kind, uint64_t key);

/// Row memory, aligned to 64 bytes.
class RowArray {
 public:
  RowArray() = default;
  RowArray(int64_t rows, int64_t hidden, DType type, ScaleKind kind = ScaleKind::none);
  std::byte* row(int64_t i) { return data_.data() + offset_ + static_cast<size_t>(i) * row_bytes_; }
  const std::byte* row(int64_t i) const { return data_.data() + offset_ + static_cast<size_t>(i) * row_bytes_; }
  std::byte* scale_row(int64_t i) { return scales_.data() + static_cast<size_t>(i) * scale_bytes_; }
  const std::byte* scale_row(int64_t i) const { return scales_.data() + static_cast<size_t>(i) * scale_bytes_; }
  size_t row_bytes() const { return row_bytes_; }
  size_t scale_bytes() const { return scale_bytes_; }
  int64_t rows() const { return rows_; }
  ConstRows view() const;

 private:
  std::vector<std::byte> data_;
  std::vector<std::byte> scales_;
  size_t offset_ = 0;
  int64_t rows_ = 0;
  int64_t hidden_ = 0;
  DType type_ = DType::bf16;
  ScaleKind kind_ = ScaleKind::none;
  size_t row_bytes_ = 0;
  size_t scale_bytes_ = 0;
};

/// The activations of a rank's tokens.
RowArray token_rows(uint64_t seed, uint64_t set, int rank, int64_t tokens, int64_t hidden, DType type, ScaleKind kind);

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// Row contents, as defined by the contract: closed-form data, quantization and combine's sums. Compile with -ffp-contract=off.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oracle/numbers.hpp"
#include "oracle/routing.hpp"

namespace oracle {

using switchyard::CombineOrder;
using switchyard::DType;
using switchyard::ScaleKind;

/// Content of rows. All patterns are functions of (seed, row key, column), so any rank can compute any row.
enum class Pattern {
  small_integers,  ///< -8 ... 7: exact in every type; sums of hundreds of them are exact in the f32 accumulator of bf16
  random_values,   ///< full mantissas, magnitudes 2^-6 ... 2^3
  unit_interval,   ///< [0, 1)
  wild_values,     ///< all magnitudes, subnormals, -0, infinities, NaN
  raw_bits,        ///< arbitrary bit patterns: for transport only
  blank_words,     ///< random_values with runs of 4, 8 and 12 bytes of ones: NaNs of 16 and 32 bits
  quantise_cases,  ///< per 128 columns: all zero, -0, tiny, subnormal, huge, one outlier, infinities (also among zeros), NaN,
                   ///< ordinary
};

struct RowKey {
  uint64_t a = 0, b = 0, c = 0;
};

/// Writes the row `key`, which has `hidden` elements.
void fill_row(Pattern pattern, uint64_t seed, RowKey key, DType type, int64_t hidden, void* out);
/// Writes arbitrary scales, one per `group` columns, as a scale row of scale_row_bytes whose padding bytes are zero.
void fill_scales(uint64_t seed, RowKey key, ScaleKind kind, int64_t hidden, void* out, int group = switchyard::kScaleGroup);
/// 64 pseudo-random bits, also used for routings and shapes.
uint64_t mix(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0);

/// Quantizes a bf16, f16 or f32 row into `hidden` e4m3 codes and one scale row with a scale per `group` columns; padding bytes
/// are zero.
void quantise(DType type, const void* row, int64_t hidden, ScaleKind kind, uint8_t* codes, void* scales,
              int group = switchyard::kScaleGroup);
/// A group's stored scale, as a float.
float scale_value(ScaleKind kind, const void* scales, int64_t group);

/// One term of a sum: a row of the combined type, and its weight.
struct Term {
  const void* row;
  float weight = 1.0f;
  int rank = 0;  ///< the rank that holds the row
};
/// One combined token. `terms` are ordered by ascending k (per_route; expert-major per_rank) or by ascending rank (rank-major).
/// `weighted`: rows are multiplied by their weights. `pre_reduced`: there is one row per rank (rank-major), so per_rank has no
/// inner sum. `host_of`, for per_host: the host of each rank of the group, where hosts are numbered by their lowest rank; empty
/// means one host.
struct SumSpec {
  DType type = DType::bf16;
  int64_t hidden = 0;
  CombineOrder order = CombineOrder::per_rank;
  bool weighted = false;
  bool pre_reduced = false;
  std::vector<int> host_of;
  const void* bias[2] = {nullptr, nullptr};
};
void combine_row(const SumSpec& spec, const std::vector<Term>& terms, void* out);

}  // namespace oracle

// SPDX-License-Identifier: Apache-2.0
// What the kernels of the grouped GEMM are given, all of it by the host, before the launch.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "gemm/gpu/row_tiles.hpp"

namespace switchyard::detail::gemm {

/// A block computes tiles of kTileColumns outputs, before gating; kInner elements of the sum at a time.
inline constexpr int kTileColumns = 256, kInner = 64;
/// Rows of the widest tile, for which a thread has registers.
inline constexpr int kMostRows = 192, kMostFp8Rows = 128;
/// Of fp8, experts with more rows than kFewFp8Rows have a kernel of their own, whose tiles consist of 64 rows, at most three
/// times.
inline constexpr int kFewFp8Rows = 64, kUnitRows = 64, kMostManyRows = 192;
/// Threads of its blocks.
inline constexpr int kManyThreads = 512;
/// Elements of an fp8 row that share a scale, and of a stage.
inline constexpr int kFp8Inner = 128;
/// Threads of a block: two warpgroups that multiply, and one whose first thread loads.
inline constexpr int kThreads = 384;
/// Experts that a block has room for beside its tiles.
inline constexpr int kMostExperts = 2048;

enum class Activation : int { relu, silu };

/// What is made of a gate and an up element: g * sigmoid(alpha * g) * (u + shift), of g = min(gate, limit) and u in
/// [-limit, limit].
struct Gating {
  float limit = 0, alpha = 0, shift = 0;
};

/// Where the rows of experts lie, in memory of the GPU; read when the kernel runs.
struct RowRanges {
  const void* num_rows = nullptr;      ///< [experts] int64_t, or int32_t
  bool wide = false;                   ///< num_rows is of int64_t
  const int64_t* first_row = nullptr;  ///< [experts], or null: expert e begins at e * rows_per_expert
  int64_t rows_per_expert = 0;
  int64_t end = 0;  ///< no expert has rows from here on, whatever the numbers say
};

/// Scales of fp8 rows and weights: one for 128 elements of a row, one for 128 x 128 weights; float32, or UE8M0 in a byte.
/// Strides are in bytes.
struct Fp8Scales {
  /// Of block b of row r of expert e: at r * row + (b >> packed) * block + (b & ((1 << packed) - 1)) + e * expert.
  const std::byte* rows = nullptr;
  int64_t row = 0, block = 0, expert = 0;
  int packed = 0;               ///< log2 of the UE8M0 scales of a row that lie side by side
  bool rows_of_expert = false;  ///< r counts from the expert's first row
  bool ue8m0 = false;
  const std::byte* weights = nullptr;  ///< [experts, weight_rows, inner_blocks]
  int weight_rows = 0;                 ///< gated: of the gate, then as many of the up half
  bool weights_ue8m0 = false;
};

/// Where quantised outputs go: e4m3 [end, columns], and the scale of block b of row r at r * row + b * block bytes.
struct Fp8Outputs {
  std::byte* rows = nullptr;
  std::byte* scales = nullptr;
  int64_t row = 0, block = 0;
  bool ue8m0 = false;
};

struct GroupedParams {
  CUtensorMap rows[kMostRows / kRowStep];  ///< [end, inner], boxes of the rows of a tile of each width
  CUtensorMap weights;                     ///< boxes as the kernel's load_stage says
  CUtensorMap many_weights;    ///< fp8: [experts, 2, n / 2, inner] if gated, else [experts, 1, n, inner]; boxes of 64 weights
  CUtensorMap out_64, out_16;  ///< [end, columns], boxes of the columns of a store and 64, or 16, rows
  RowRanges ranges;
  /// Experts with fewer or more rows have no tiles.
  int64_t least = 1, most = INT64_MAX;
  uint16_t* out = nullptr;
  uint32_t* tickets = nullptr;  ///< {claimed, blocks that have ended}; 0 before and after a launch
  int num_experts = 0;
  int columns = 0;            ///< of an output row
  int column_tiles = 0;       ///< of the product
  int most_rows = kMostRows;  ///< of a tile
  int inner_blocks = 0;       ///< at least 3 but for fp8; blocks beyond the end of the sum are 0
  int gate_rows = 0;          ///< gated: weights of the gate, before those of the up half
  uint32_t shared_bytes = 0;
  Activation activation = Activation::relu;
  Gating gating;
  Fp8Scales scales;      ///< of the fp8 kernels
  Fp8Outputs quantised;  ///< of the fp8 kernel that quantises, instead of `out` and its maps
};

}  // namespace switchyard::detail::gemm

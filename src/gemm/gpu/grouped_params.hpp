// SPDX-License-Identifier: Apache-2.0
// Parameters for the grouped GEMM kernels, all set by the host before the launch.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "gemm/gpu/row_tiles.hpp"

namespace switchyard::detail::gemm {

/// A block computes tiles of kTileColumns outputs (before gating), kInner elements of the inner dimension at a time.
inline constexpr int kTileColumns = 256, kInner = 64;
/// Maximum rows per tile, limited by the registers per thread.
inline constexpr int kMaxRows = 192, kMaxFp8Rows = 128;
/// For fp8, experts with more rows than kFewFp8Rows use a separate kernel, whose tiles consist of units of kUnitRows rows.
inline constexpr int kFewFp8Rows = 64, kUnitRows = 64;
/// Number of elements of an fp8 row that share a scale; also the number of elements per stage.
inline constexpr int kFp8Inner = 128;
/// Threads per block: two math warpgroups, and one whose first thread loads.
inline constexpr int kThreads = 384;
/// Maximum number of experts, limited by the shared memory that tiles leave in a block.
inline constexpr int kMaxExperts = 2048;

enum class Activation : int { relu, silu };

/// Parameters of the activation for a gate element g0 and an up element u0: g * sigmoid(alpha * g) * (u + shift), with g =
/// min(g0, limit) and u = u0 clamped to [-limit, limit].
struct Gating {
  float limit = 0, alpha = 0, shift = 0;
};

/// Row ranges of the experts, in GPU memory; read when the kernel runs.
struct RowRanges {
  const void* num_rows = nullptr;      ///< [experts] int64_t, or int32_t
  bool wide = false;                   ///< num_rows is int64_t
  const int64_t* first_row = nullptr;  ///< [experts], or null: expert e begins at e * rows_per_expert
  int64_t rows_per_expert = 0;
  int64_t end = 0;  ///< rows from here on are ignored, regardless of num_rows
};

/// Scales of fp8 rows and weights, as float32 or as UE8M0 bytes. With ScaleGranularity::block, they are those of blocks of 128
/// elements; with per_channel, a row has only block 0. Strides are in bytes.
struct Fp8Scales {
  /// The scale of block b of row r of expert e is at r * row + (b >> packed) * block + (b & ((1 << packed) - 1)) + e * expert.
  const std::byte* rows = nullptr;
  int64_t row = 0, block = 0, expert = 0;
  int packed = 0;               ///< log2 of the number of adjacent UE8M0 scales of a row
  bool rows_of_expert = false;  ///< r counts from the expert's first row
  bool ue8m0 = false;
  const std::byte* weights = nullptr;  ///< [experts, weight_rows, inner_blocks]; per channel: float [experts, n]
  int weight_rows = 0;                 ///< gated: rows of the gate half, then as many of the up half; per channel: n
  bool weights_ue8m0 = false;
};

/// Destination of quantized outputs, e4m3 [end, columns]. The scale of block b of row r is at byte r * row + b * block.
struct Fp8Outputs {
  std::byte* rows = nullptr;
  std::byte* scales = nullptr;
  int64_t row = 0, block = 0;
  bool ue8m0 = false;
  const float* fixed = nullptr;  ///< if not null, the scale of all outputs; a row then has one scale
};

struct GroupedParams {
  CUtensorMap rows[kMaxRows / kRowStep];  ///< [end, inner], boxes of the rows of a tile of each width
  CUtensorMap weights;                    ///< boxes as in the kernel's load_stage
  CUtensorMap many_weights;  ///< fp8: [experts, 2, n / 2, inner] if gated, else [experts, 1, n, inner]; see set_many_weights()
  CUtensorMap out_64, out_16;  ///< [end, columns], boxes of the columns of one store times 64, or 16, rows
  RowRanges ranges;
  /// Range of rows per expert; experts with more or fewer rows have no tiles.
  int64_t min = 1, max = INT64_MAX;
  uint16_t* out = nullptr;
  uint32_t* tickets = nullptr;  ///< {claimed, number of blocks that have ended}; 0 before and after a launch
  int num_experts = 0;
  int columns = 0;          ///< of an output row
  int column_tiles = 0;     ///< of the product
  int max_rows = kMaxRows;  ///< of a tile
  int inner_blocks = 0;     ///< at least 3, except in fp8; blocks past the end of the sum are 0
  int gate_rows = 0;        ///< gated: number of gate weights, which precede those of the up half
  uint32_t shared_bytes = 0;
  /// Address of a block's first byte of dynamic shared memory: the bytes that the driver reserves, because the kernels have no
  /// static shared memory.
  uint32_t shared_base = 0;
  uint32_t zero = 0;  ///< 0, unknown to the compiler
  Activation activation = Activation::relu;
  Gating gating;
  Fp8Scales scales;      ///< of the fp8 kernels
  Fp8Outputs quantised;  ///< of the quantizing fp8 kernel, instead of `out` and its maps
  CUtensorMap out_wide;  ///< fp8: [end, columns], boxes of 64 columns x 16 rows
};

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
// Sizes of the fused layer on GPUs, shared by host and device code, and its private memory on both backends.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/carver.hpp"
#include "base/macros.hpp"
#include "exchange/fused/fused_moe.hpp"
#include "layout/fused_layout.hpp"

namespace switchyard::detail {

/// Rows of the largest tile. bf16: the most that fit into a block's shared memory beside the row pieces in flight. fp8: the
/// rows of two blocks; see gemm/gpu/fp8/wide_tiles.hpp.
inline constexpr int kFusedRows = 176, kFusedFp8Rows = 256;
/// fp8: number of rows whose scales are loaded together: the rows of a block and up to three rows before them.
inline constexpr int kFusedScaleBox = kFusedFp8Rows / 2 + 4;
/// Rows are transferred through kPieceStorageBytes bytes of a block's shared memory, in pieces of at most kPieceBytes, two at a
/// time. An fp8 token of 7168 columns is one piece, including its scales. Rows no longer than a piece are transferred whole, as
/// many at a time as fit, up to kMaxSlots.
inline constexpr uint32_t kPieceBytes = 7424, kPieceStorageBytes = 2 * kPieceBytes;
inline constexpr int kMaxSlots = 8;
/// A warp that moves rows takes about kBytesAtOnce at a time (8 to 32 rows); a row's flag is set only after all rows taken with
/// it have been moved.
inline constexpr int64_t kBytesAtOnce = 96 * 1024;
/// per_rank: fewer (4 to 32 rows), because only a token's highest row returns a sum, which is computed from several rows.
inline constexpr int64_t kSummedBytesAtOnce = 48 * 1024;

/// Transfer format for rows of a given size.
struct CopyPlan {
  uint32_t piece = 0;  ///< bytes of a piece, except the last of a row
  uint32_t pitch = 0;  ///< distance between slots in shared memory
  int slots = 0;       ///< pieces per round: if rows are whole, one per row; else all of one row
  int at_once = 0;     ///< rows that a warp takes together, in [1, 32]
  bool whole = false;  ///< a row is one piece

  /// Bytes of each row moved per round.
  SWITCHYARD_FN int64_t round_bytes() const { return int64_t{piece} * (whole ? 1 : slots); }
};
/// Output columns of an up tile, and of a down tile.
inline constexpr int kUpColumns = 128, kDownColumns = 256;
/// fp8: largest hidden size for which the last piece of a token contains all its scales.
inline constexpr int64_t kMaxFusedFp8Hidden = 65536;
/// Maximum number of experts: in the plan, and per rank for fp8, where a block's shared memory is the limit.
inline constexpr int kMaxFusedExperts = 4608, kMaxFusedFp8Experts = 2040;
/// Shared memory for the tracks of a tracing kernel.
inline constexpr uint32_t kTrackBytes = 1024;

/// Overflow::split: pass i, from 0, of a call covers tokens [i * tokens, (i + 1) * tokens) of every rank. A pass never exceeds
/// the capacity, because any W * tokens * K routes fit.
struct SplitPasses {
  int count = 0;       ///< of a call; 0: overflow is not split, or the capacity suffices for any routing
  int64_t tokens = 0;  ///< of a pass
};
/// Maximum number of passes. On GPUs, every call enqueues all of its passes.
inline constexpr int64_t kMaxPasses = 64;

/// Sizes that depend on the weight type. An expert with r rows has at most r / tile_rows + 1 row tiles, each with `writers`
/// flags per column tile. `element`: bytes per operand element.
struct FusedTypeSizes {
  int tile_rows, writers;
  int64_t element;
};
inline FusedTypeSizes fused_type_sizes(const FusedMoeConfig& c) {
  return c.dtype == DType::fp8_e4m3 ? FusedTypeSizes{kFusedFp8Rows / 2, 2, 1} : FusedTypeSizes{kFusedRows, 1, 2};
}
/// fp8: elements that share a scale.
inline constexpr int64_t kFusedScaled = 128;

/// fp8: number of float4 values per expert in the spread weight scales.
struct FusedWeightScales {
  int64_t up, down;
};
inline FusedWeightScales weight_scales_of(const FusedMoeConfig& c) {
  const int64_t up_tiles = (c.intermediate + kUpColumns - 1) / kUpColumns,
                down_tiles = (c.hidden + kDownColumns - 1) / kDownColumns;
  return {up_tiles * (c.hidden / kFusedScaled), down_tiles * (c.intermediate / kFusedScaled)};
}

/// Bytes of the spread scales for one weight set with `local_experts` experts: up first, then down. A multiple of 128, like all
/// parts of this memory.
inline size_t weight_scales_bytes(const FusedMoeConfig& c, int local_experts) {
  if (c.dtype != DType::fp8_e4m3) return 0;
  return static_cast<size_t>(round_up(local_experts * (weight_scales_of(c).up + weight_scales_of(c).down) * 16, 128));
}

/// Assigns the parts of the memory at `base`, or only counts bytes if `base` is null. `local_experts`: number of experts on the
/// rank.
inline int64_t carve_fused(std::byte* base, const FusedMoeConfig& c, int64_t rows, int local_experts, FusedMemory& m) {
  const FusedTypeSizes type = fused_type_sizes(c);
  const int64_t tiles = (rows / type.tile_rows + local_experts) * type.writers;
  Carver carver(base);
  carver.take(m.counters, 1);
  carver.take(m.arrived, rows);
  carver.take(m.h_done, tiles * ((c.intermediate + kUpColumns - 1) / kUpColumns));
  carver.take(m.y_done, tiles * ((c.hidden + kDownColumns - 1) / kDownColumns));
  m.flags = carver.bytes();
  carver.take(m.h, rows * c.intermediate * type.element);
  carver.take(m.y, rows * c.hidden * 2);
  m.x_rows = m.y;
  if (c.dtype != DType::fp8_e4m3) return carver.bytes();
  m.scale_pitch = (rows + 3) / 4 * 4;
  carver.take(m.x_scales, c.hidden / kFusedScaled * m.scale_pitch);
  carver.take(m.h_scales, c.intermediate / kFusedScaled * m.scale_pitch);
  return carver.bytes();
}

/// carve_fused() for the CPU, where a product has a single column tile and a row tile has at least one row.
inline int64_t carve_fused_on_cpu(std::byte* base, const FusedMoeConfig& c, int64_t rows, FusedMemory& m) {
  constexpr int64_t kElement = 2;
  Carver carver(base);
  carver.take(m.counters, 1);
  for (uint64_t** const flags : {&m.arrived, &m.h_done, &m.y_done}) carver.take(*flags, rows);
  m.flags = carver.bytes();
  carver.take(m.h, rows * c.intermediate * kElement);
  carver.take(m.y, rows * c.hidden * kElement);
  m.x_rows = m.y;
  return carver.bytes();
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Divides the gradients of an expert's weights into tiles, defines the order in which tiles are computed, and divides an
// expert's rows (the inner dimension) into stages. Pure functions, for host and device.
//
// An N x K gradient matrix has tiles of 256 x 192; the last tiles in a row of tiles may be as narrow as 64. Tickets number the
// tiles of one expert after another, in bands of at most kGradientBand tiles along N. Within a band, the tiles of one range of
// K are consecutive: if an expert has a few hundred rows, both operands then stay in the cache and are loaded into it once per
// band.
#pragma once

#include <cstdint>

#include "gemm/gpu/row_tiles.hpp"

namespace switchyard::detail::gemm {

/// Number of gradients per tile along N, and its maximum along K.
inline constexpr int kGradientTileN = 256, kGradientTileK = 192;
/// Number of operand columns that are contiguous in shared memory (128 bytes).
inline constexpr int kChunkColumns = 64;
/// Rows per stage, and rows per matrix instruction.
inline constexpr int kStageRows = 32, kStepRows = 16;
/// Stages at the end of a tile whose halves are multiplied one after the other.
inline constexpr int kEndStages = 2;
inline constexpr int kGradientBand = 16;
/// A box of gradients in flight to memory: number of rows, all from one warp, and bytes per row.
inline constexpr uint32_t kBoxRows = 16, kBoxRowBytes = 128, kBoxBytes = kBoxRows * kBoxRowBytes;
/// Boxes in shared memory per math warp.
inline constexpr uint32_t kSendingWarps = 8, kBoxesOfWarp = 3;

SWITCHYARD_INLINE int gradient_tiles_n(int64_t n) { return static_cast<int>((n + kGradientTileN - 1) / kGradientTileN); }
SWITCHYARD_INLINE int gradient_tiles_k(int64_t k) { return static_cast<int>((k + kGradientTileK - 1) / kGradientTileK); }

/// Number of the `k` columns along K that tile `tile` computes: 64, 128 or 192.
SWITCHYARD_INLINE int gradient_tile_width(int k, int tile) {
  const int left = k - tile * kGradientTileK;
  return left >= kGradientTileK ? kGradientTileK : (left + kChunkColumns - 1) / kChunkColumns * kChunkColumns;
}

struct GradientPlace {
  int tile_n = 0, tile_k = 0;
};
/// Position of ticket `ticket` within an expert, one of tiles_n * tiles_k.
SWITCHYARD_INLINE GradientPlace gradient_place(int64_t ticket, int tiles_n, int tiles_k) {
  const TilePlace place = tile_place(ticket, tiles_n, tiles_k, kGradientBand);
  return {place.row_tile, place.column_tile};
}

/// Number of stages for `rows` rows; excess rows in the last stage are cleared.
SWITCHYARD_INLINE int count_stages(int rows) { return (rows + kStageRows - 1) / kStageRows; }
/// Number of stages in a tile with `rows` rows: 0 without rows; otherwise more than kEndStages, the first of which may be all
/// zero.
SWITCHYARD_INLINE int tile_stages(int rows) {
  const int stages = count_stages(rows);
  return rows == 0 || stages > kEndStages ? stages : kEndStages + 1;
}

/// Shared memory for a stage, and for barriers and entries. The boxes of all warps follow the stages; a list with one word per
/// expert plus one comes last.
SWITCHYARD_INLINE constexpr uint32_t gradient_stage_bytes() { return kStageRows * (kGradientTileN + kGradientTileK) * 2; }
inline constexpr uint32_t kFixedSharedBytes = 1024;
/// Number of stages in a block with `shared_bytes` of shared memory; exceeds kEndStages and kLead on every sm_90 GPU.
SWITCHYARD_INLINE uint32_t fitting_stages(uint32_t shared_bytes, int num_experts) {
  constexpr uint32_t kMax = 15;  // limited by the room for barriers
  const uint32_t list = (static_cast<uint32_t>(num_experts) + 1) * 4, boxes = kSendingWarps * kBoxesOfWarp * kBoxBytes;
  const uint32_t fit = (shared_bytes - kFixedSharedBytes - list - boxes) / gradient_stage_bytes();
  return fit < kMax ? fit : kMax;
}

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
// How the gradients of an expert's weights are divided into tiles, the order in which the tiles are computed, and how an
// expert's rows, the elements of the sum, are divided into stages. Pure functions, for host and device.
//
// A matrix of N x K gradients has tiles of 256 x 192; the last tiles of a row of tiles may be as narrow as 64. Tickets count
// the tiles of one expert after the other, in bands of at most kGradientBand tiles along N. Within a band, the tiles of one
// range of K are consecutive: both operands of an expert with a few hundred rows then stay in the cache and are loaded into it
// once per band.
#pragma once

#include <cstdint>

#include "gemm/gpu/row_tiles.hpp"

namespace switchyard::detail::gemm {

/// Gradients of a tile: along N, and maximum along K.
inline constexpr int kGradientTileN = 256, kGradientTileK = 192;
/// Columns of an operand that are contiguous in shared memory: 128 bytes.
inline constexpr int kChunkColumns = 64;
/// Rows of a stage, and of one matrix instruction.
inline constexpr int kStageRows = 32, kStepRows = 16;
/// Stages at the end of a tile whose halves are multiplied one after the other.
inline constexpr int kEndStages = 2;
inline constexpr int kGradientBand = 16;
/// A box of gradients in transfer to memory: number of rows, all of one warp, and bytes of a row.
inline constexpr uint32_t kBoxRows = 16, kBoxRowBytes = 128, kBoxBytes = kBoxRows * kBoxRowBytes;
/// Boxes in shared memory for each warp that multiplies.
inline constexpr uint32_t kSendingWarps = 8, kBoxesOfWarp = 3;

SWITCHYARD_INLINE int gradient_tiles_n(int64_t n) { return static_cast<int>((n + kGradientTileN - 1) / kGradientTileN); }
SWITCHYARD_INLINE int gradient_tiles_k(int64_t k) { return static_cast<int>((k + kGradientTileK - 1) / kGradientTileK); }

/// Columns along K that tile `tile` computes, of `k`: 64, 128 or 192.
SWITCHYARD_INLINE int gradient_tile_width(int k, int tile) {
  const int left = k - tile * kGradientTileK;
  return left >= kGradientTileK ? kGradientTileK : (left + kChunkColumns - 1) / kChunkColumns * kChunkColumns;
}

struct GradientPlace {
  int tile_n = 0, tile_k = 0;
};
/// Place of ticket `ticket` of an expert, one of tiles_n * tiles_k.
SWITCHYARD_INLINE GradientPlace gradient_place(int64_t ticket, int tiles_n, int tiles_k) {
  const TilePlace place = tile_place(ticket, tiles_n, tiles_k, kGradientBand);
  return {place.row_tile, place.column_tile};
}

/// Stages for `rows` rows; the excess rows of the last stage are cleared.
SWITCHYARD_INLINE int count_stages(int rows) { return (rows + kStageRows - 1) / kStageRows; }
/// Stages of a tile of `rows` rows: none without rows, else more than kEndStages, the first of which may be all zero.
SWITCHYARD_INLINE int tile_stages(int rows) {
  const int stages = count_stages(rows);
  return rows == 0 || stages > kEndStages ? stages : kEndStages + 1;
}

/// Shared memory of a stage, and of barriers and entries. The boxes of all warps follow the stages; a list with one word per
/// expert plus one is last.
SWITCHYARD_INLINE constexpr uint32_t gradient_stage_bytes() { return kStageRows * (kGradientTileN + kGradientTileK) * 2; }
inline constexpr uint32_t kFixedSharedBytes = 1024;
/// Stages of a block with `shared_bytes` of shared memory; more than kEndStages and kLead on every GPU of sm_90.
SWITCHYARD_INLINE uint32_t fitting_stages(uint32_t shared_bytes, int num_experts) {
  constexpr uint32_t kMax = 15;  // limited by the room for barriers
  const uint32_t list = (static_cast<uint32_t>(num_experts) + 1) * 4, boxes = kSendingWarps * kBoxesOfWarp * kBoxBytes;
  const uint32_t fit = (shared_bytes - kFixedSharedBytes - list - boxes) / gradient_stage_bytes();
  return fit < kMax ? fit : kMax;
}

}  // namespace switchyard::detail::gemm

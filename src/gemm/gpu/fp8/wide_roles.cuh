// SPDX-License-Identifier: Apache-2.0
// Roles of wide_kernel.cuh that prepare its tiles: claiming and loading, and the layout of shared memory.
#pragma once

#include "arch/cuda/cluster.cuh"
#include "arch/cuda/cuda_quantize.cuh"
#include "gemm/gpu/fp8/kernel.cuh"
#include "gemm/gpu/fp8/wide_tiles.hpp"

namespace switchyard::detail::gemm {

inline constexpr int kWideGroups = 2, kHalfColumns = 128;      // weights of one product
inline constexpr uint32_t kUnitBytes = kUnitRows * kFp8Inner;  // rows of a unit
inline constexpr uint16_t kBothBlocks = 3;
inline constexpr uint32_t kHalfWeightBytes = kHalfColumns * kFp8Inner;
inline constexpr uint32_t kWideRowsAt = 2 * kHalfWeightBytes;  // in a stage, after its weights
inline constexpr uint32_t kWideStageBytes = kWideRowsAt + kWideGroups * kUnitBytes;
/// Staging bytes per warp: 16 rows, either of 64 bf16 outputs or of a group of 128 fp8 outputs.
inline constexpr uint32_t kWideStaging = 2048;
inline constexpr uint32_t kSharedBytes = 227 * 1024;  // of a block of compute capability 9.0
inline constexpr uint32_t kSharesWeights = 1u << 15;  // in the shape of an announced tile
static_assert(kUnitRows == kWideUnit && kWideGroups == kWideBlockUnits && kTileColumns == 2 * kHalfColumns);

/// `kTileFinish` has the same meaning as in kernel.cuh. `kFastSums`: Accumulate::fast, with ScaleGranularity::block.
template <Finish kTileFinish, bool kFastSums, ScaleGranularity kGranularity = ScaleGranularity::block>
struct WideKind : Fp8Kind<kTileFinish, kGranularity> {
  using Base = Fp8Kind<kTileFinish, kGranularity>;
  using Base::kColumns, Base::kGated, Base::kScaling;
  static constexpr bool kFast = kFastSums;
  static constexpr uint32_t kWarpStaging = kWideStaging;
  static constexpr int kTurns = kScaling == ScaleGranularity::per_channel ? 0 : kFast ? 1 : 2;  ///< of a warpgroup per stage
  static constexpr int kScaledRows = kWideGroups * kUnitRows, kWeightScales = kScaling == ScaleGranularity::block ? 2 : 0;
  /// Scales of a block's two halves of weights. Gated: the gate and up halves.
  static __device__ int weight_scale(const GroupedParams& p, const Tile& t, int i) {
    return kGated ? t.column_tile + i * (p.scales.weight_rows / 2) : t.column_tile * 2 + i;
  }
  static __device__ int channel(const GroupedParams& p, const Tile& t, int i) {
    const int output = t.column_tile * kColumns + (kGated ? i % kHalfColumns : i);
    return output >= p.columns ? -1 : output + (kGated && i >= kHalfColumns ? p.gate_rows : 0);
  }
};

/// Layout of shared memory: the barriers and slots of SharedStorage, staging, stages, scales, and the list of first tickets.
template <class K>
struct WideStorage : SharedStorage {
  static constexpr uint32_t kStagesAt = kFixedBytes + kMathWarps * K::kWarpStaging;
  /// The maximum that fits. A constant: the compiler computes descriptors in uniform registers only if the index of the stage
  /// is provably uniform.
  static constexpr uint32_t kStages = 4;
  static_assert(kStagesAt % 1024 == 0);
  static_assert(kStagesAt + kStages * (kWideStageBytes + kScaleBytes<K>)+2 * kTileScaleBytes<K> + (kMaxGemmExperts + 2) * 4 <=
                kSharedBytes);

  __device__ explicit WideStorage(uint32_t base_in) : SharedStorage{base_in, kStages} {}
  static constexpr __device__ uint32_t num_stages() { return kStages; }

  __device__ uint32_t warp_staging(int warp) const {
    return base + kFixedBytes + static_cast<uint32_t>(warp) * K::kWarpStaging;
  }
  __device__ uint32_t stage(uint32_t slot) const { return base + kStagesAt + slot * kWideStageBytes; }
  __device__ uint32_t scales(uint32_t slot) const { return stage(num_stages()) + slot * kScaleBytes<K>; }
  __device__ uint32_t tile_scales(uint32_t slot) const { return scales(num_stages()) + slot * kTileScaleBytes<K>; }
};

/// This block's part of the cluster's tile.
__device__ __forceinline__ Tile wide_tile_of(const GroupedParams& p, const int* first_tickets, uint32_t ticket) {
  const int expert = expert_of_ticket(p, first_tickets, ticket);
  if (expert < 0) return {0, 0, 0, kNoTile};
  const int64_t rows = rows_of(p, expert);
  const WideTile t = wide_tile(rows, static_cast<int64_t>(ticket) - first_tickets[expert], p.column_tiles);
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int64_t first = (t.first_unit + (t.shares_weights ? rank * kWideBlockUnits : 0)) * kUnitRows;
  const int64_t width = static_cast<int64_t>(t.units) * kUnitRows, left = rows - first;
  const auto valid = static_cast<uint32_t>(left < width ? left : width);
  return {expert, t.column_tile + (t.shares_weights ? 0 : rank), static_cast<int>(first_row_of(p.ranges, expert) + first),
          static_cast<uint32_t>(width) | (t.shares_weights ? kSharesWeights : 0) | valid << 16};
}
__device__ __forceinline__ int wide_units(uint32_t shape) { return static_cast<int>(shape & (kSharesWeights - 1)) / kUnitRows; }

/// Announces the cluster's tiles, from one thread per block. The first block's thread claims tiles with a ticket, as in
/// kernel.cuh, and sends the ticket to its counterpart in the second block, through two mailbox slots. When a tile is claimed,
/// its slot is free: the tile two positions earlier needed operands that the other block loaded only after reading the slot.
/// `tile_of_ticket(ticket)` returns this block's part of a tile.
template <class AnyStorage, class TileOf>
__device__ __forceinline__ void announce_tiles(const GroupedParams& p, const AnyStorage& storage, TileOf tile_of_ticket) {
  const bool leads = ptx::cluster_rank() == 0;
  const uint32_t clusters = gridDim.x / 2;
  uint32_t ticket = blockIdx.x / 2;
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1);
    if (i > 0) ptx::mbarrier_wait(storage.due(), static_cast<uint32_t>(i - 1) & 1);
    if (i > 0 && leads) ticket = clusters + atomicAdd(p.tickets, 1u);
    ptx::mbarrier_wait(storage.taken(slot), static_cast<uint32_t>(i >> 1 & 1) ^ 1);
    if (i > 0 && leads) {
      ptx::store_async(ptx::shared_of_block(storage.letter(slot), 1), ticket, ptx::shared_of_block(storage.sent(slot), 1));
    } else if (i > 0) {
      ptx::mbarrier_expect(storage.sent(slot), 4);
      ptx::mbarrier_wait(storage.sent(slot), static_cast<uint32_t>(i - 1) >> 1 & 1);
      ticket = ptx::load_shared(storage.letter(slot));
    }
    const Tile t = tile_of_ticket(ticket);
    ptx::store_shared_16(storage.entry(slot), {t.expert, t.column_tile, t.row, static_cast<int>(t.shape)});
    ptx::mbarrier_arrive(storage.announced(slot));
    if (t.shape == kNoTile) break;
  }
  if (leads && atomicAdd(p.tickets + 1, 1u) == clusters - 1) p.tickets[0] = p.tickets[1] = 0;
}

/// Starts loading stage `slot`, which is empty: inner block `block` of the operands of tile `t`. `more`: bytes of other copies
/// that fill the stage.
template <class K>
__device__ __forceinline__ void load_wide_stage(const GroupedParams& p, const WideStorage<K>& storage, const Tile& t,
                                                uint32_t slot, int block, uint32_t more = 0) {
  const int rank = static_cast<int>(ptx::cluster_rank()), inner = block * kFp8Inner;
  const int units = wide_units(t.shape), part = units * (kUnitRows / 2);  // rows loaded for both blocks if they share rows
  const uint32_t weights = storage.stage(slot), rows = weights + kWideRowsAt, bar = storage.full(slot);
  // The halves of a block's weights: gate and up weights of the same outputs, or weights of adjacent outputs.
  const int output = t.column_tile * K::kColumns;
  const auto load_weights = [&](int half, auto load) {
    load(weights + static_cast<uint32_t>(half) * kHalfWeightBytes, K::kGated ? output : output + half * kHalfColumns,
         K::kGated ? half : 0);
  };
  const auto load_own = [&](uint32_t to, int y, int z) { ptx::load_box(to, &p.many_weights, bar, inner, y, z, t.expert); };
  const auto load_both = [&](uint32_t to, int y, int z) {
    ptx::load_box_to_blocks(to, &p.many_weights, bar, inner, y, z, t.expert, kBothBlocks);
  };
  ptx::mbarrier_expect(bar, static_cast<uint32_t>(units) * kUnitBytes + 2 * kHalfWeightBytes + more);
  if ((t.shape & kSharesWeights) != 0) {
    load_weights(rank, load_both);
    ptx::load_box(rows, &p.rows[kWideGroups * kUnitRows / kRowStep - 1], bar, inner, t.row);
  } else {
    load_weights(0, load_own);
    load_weights(1, load_own);
    ptx::load_box_to_blocks(rows + static_cast<uint32_t>(rank * part) * kFp8Inner, &p.rows[part / kRowStep - 1], bar, inner,
                            t.row + rank * part, kBothBlocks);
  }
}

/// Role of the loader thread.
template <class K>
__device__ __forceinline__ void load_wide_tiles(const GroupedParams& p, const WideStorage<K>& storage) {
  const int due_at = p.inner_blocks > kBlocksAhead ? p.inner_blocks - kBlocksAhead : 0;
  uint32_t slot = 0, parity = 1;
  for_each_tile(storage, [&](const Tile& t) {
    for (int block = 0; block < p.inner_blocks; ++block) {
      if (block == due_at) ptx::mbarrier_arrive(storage.due());
      ptx::mbarrier_wait(storage.empty(slot), parity);
      load_wide_stage(p, storage, t, slot, block);
      if (++slot == storage.num_stages()) slot = 0, parity ^= 1;
    }
  });
}

/// Releases a stage that this warp has read, in both blocks, because the other block loads a part of it.
template <class AnyStorage>
__device__ __forceinline__ void release_in_both(const AnyStorage& storage, uint32_t slot) {
  if (lane() < 2) ptx::mbarrier_arrive_in_cluster(ptx::shared_of_block(storage.empty(slot), static_cast<uint32_t>(lane())));
}

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
// The product roles of a block of the fp8 layer kernel: claiming, loading, multiplying, announcing. As in
// gemm/gpu/fp8/many_kernel.cuh, two blocks form a cluster that processes the same tiles. Differences: tiles are loaded once
// their rows are ready, the scales are loaded as well and are laid out for box copies, and a warp announces stored tiles.
#pragma once

#include "exchange/fused/layer_storage.cuh"
#include "gemm/gpu/fp8/many_kernel.cuh"

namespace switchyard::detail::fused {

inline constexpr int kFp8LoaderWarp = 12, kFp8ClaimerWarp = 13, kFp8AnnouncerWarp = 14, kFp8MoverWarp = 15;

/// Each warp has space for 8 rows of a quantized group, which the other block also writes, followed by space for 8 rows of 64
/// outputs, whose store may be in progress at the same time.
template <gemm::Finish kFinish>
struct FusedFp8Kind : gemm::ManyKind<kFinish> {
  static constexpr uint32_t kRowsAt = 2048, kWarpStaging = kRowsAt + 1024;
  static constexpr int kScaledRows = kFusedScaleBox;
  static constexpr uint32_t kStages = 4;
};
/// A scale copy begins at a multiple of 16 bytes, up to this many rows before the tile.
__device__ __forceinline__ int scales_before(int row) { return row & 3; }
using Fp8Up = FusedFp8Kind<gemm::Finish::quantised>;
using Fp8Down = FusedFp8Kind<gemm::Finish::plain>;
/// Both kinds occupy the same space.
template <class K>
__device__ __forceinline__ gemm::ManySharedStorage<K> many_storage(const LayerStorage& r) {
  static_assert(gemm::kScaleBytes<K> == gemm::kScaleBytes<Fp8Up> &&
                gemm::ManySharedStorage<K>::kFixed == gemm::ManySharedStorage<Fp8Up>::kFixed);
  return {r.storage};
}

/// Role of the warp that announces the cluster's tiles: like gemm::announce_tiles(), with layer tickets. It also waits for a
/// tile's rows while the previous tile is processed.
template <class A>
__device__ __forceinline__ void claim_fp8_tiles(const LayerCall& c, const int* first_tiles) {
  const LayerStorage& r = c.r;
  const gemm::ManySharedStorage<Fp8Up> storage = many_storage<Fp8Up>(r);
  const bool leads = ptx::cluster_rank() == 0;
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1), parity = static_cast<uint32_t>(i >> 1 & 1);
    if (i > 0) ptx::mbarrier_wait(storage.due(), static_cast<uint32_t>(i - 1) & 1);
    uint32_t ticket = 0;
    if (leads) ticket = static_cast<uint32_t>(take(&c.p.memory.counters->tickets, 1));
    ptx::mbarrier_wait(storage.taken(slot), parity ^ 1);
    if (leads && lane() == 0)
      ptx::store_async(ptx::shared_of_block(storage.letter(slot), 1), ticket, ptx::shared_of_block(storage.sent(slot), 1));
    if (!leads) {
      if (lane() == 0) ptx::mbarrier_expect(storage.sent(slot), 4);
      __syncwarp();
      ptx::mbarrier_wait(storage.sent(slot), parity);
      ticket = ptx::load_shared(storage.letter(slot));
    }
    const LayerTile t = layer_tile_of<Fp8Layer>(c.p, first_tiles, ticket);
    await_rows<A, Fp8Layer>(c, t);
    announce_tile(r, slot, t);
    if (t.tile.shape == gemm::kNoTile) return;
  }
}

/// Loads one stage: this block's weights, half of each unit's rows for both blocks, and all scales for this block.
template <class K>
__device__ __forceinline__ void load_fp8_stage(const gemm::GroupedParams& g, const FusedFp8Scales& scales, const Tile& t,
                                               const gemm::ManySharedStorage<K>& storage, uint32_t slot, int block) {
  constexpr uint32_t kHalfUnit = gemm::kUnitBytes / 2, kHalfWeights = gemm::kBlockWeights / 2 * gemm::kFp8Inner;
  constexpr uint32_t kScalesOfRows = K::kScaledRows * 4, kScalesOfWeights = sizeof(float4);
  const int rank = static_cast<int>(ptx::cluster_rank()), units = static_cast<int>(t.shape & 0xffff) / gemm::kUnitRows;
  const int output = t.column_tile * K::kColumns + rank * (K::kColumns / 2);
  const int second = K::kGated ? output : output + gemm::kBlockWeights / 2, inner = block * gemm::kFp8Inner;
  const uint32_t rows = storage.stage(slot), weights = rows + gemm::kManyRowBytes, bar = storage.full(slot);
  ptx::mbarrier_expect(bar,
                       static_cast<uint32_t>(units) * gemm::kUnitBytes + 2 * kHalfWeights + kScalesOfRows + kScalesOfWeights);
  ptx::load_box(weights, &g.many_weights, bar, inner, output, 0, t.expert);
  ptx::load_box(weights + kHalfWeights, &g.many_weights, bar, inner, second, K::kGated ? 1 : 0, t.expert);
  for (int unit = 0; unit < units; ++unit)
    ptx::load_box_to_blocks(rows + static_cast<uint32_t>(unit) * gemm::kUnitBytes + static_cast<uint32_t>(rank) * kHalfUnit,
                            &g.rows[gemm::kUnitRows / 2 / kRowStep - 1], bar, inner,
                            t.row + unit * gemm::kUnitRows + rank * (gemm::kUnitRows / 2), gemm::kBothBlocks);
  ptx::load_box(storage.scales(slot), &scales.rows, bar, t.row - scales_before(t.row), block);
  const int64_t part = (static_cast<int64_t>(t.expert) * g.column_tiles + t.column_tile) * 2 + rank;
  ptx::bulk_load(storage.scales(slot) + gemm::kWeightScalesAt<K>, scales.weights + part * g.inner_blocks + block,
                 kScalesOfWeights, bar);
}

/// Role of the loader warp.
__device__ __forceinline__ void load_fp8_tiles(const LayerCall& c) {
  const FusedParams& p = c.p;
  const LayerStorage& r = c.r;
  uint32_t slot = 0, parity = 1;
  for_each_layer_tile(r, [&](const LayerTile& t) {
    if (lane() != 0) return;
    ptx::fence_proxy_async_global();
    const int blocks = (t.down ? p.down : p.up).inner_blocks;
    const int due_at = blocks > kClaimedAhead ? blocks - kClaimedAhead : 0;
    for (int block = 0; block < blocks; ++block) {
      if (block == due_at) ptx::mbarrier_arrive(r.storage.due());
      ptx::mbarrier_wait(r.storage.empty(slot), parity);
      if (t.down)
        load_fp8_stage(p.down, p.down_scales, t.tile, many_storage<Fp8Down>(r), slot, block);
      else
        load_fp8_stage(p.up, p.up_scales, t.tile, many_storage<Fp8Up>(r), slot, block);
      if (++slot == Fp8Up::kStages) slot = 0, parity ^= 1;
    }
  });
}

/// Role of the signaling warp: sets this block's flag of a tile once this block's part of the tile is stored. A tile uses the
/// barrier of its slot; the next tile in that slot begins only after this warp has released the entry.
template <class A>
__device__ __forceinline__ void announce_fp8_tiles(const LayerCall& c) {
  const FusedParams& p = c.p;
  const LayerStorage& r = c.r;
  const int rank = static_cast<int>(ptx::cluster_rank());
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1), parity = static_cast<uint32_t>(i >> 1 & 1);
    ptx::mbarrier_wait(r.storage.announced(slot), parity);
    const LayerTile t = read_layer_tile(r.storage.entry(slot));
    if (t.tile.shape == gemm::kNoTile) return;
    ptx::mbarrier_wait(r.stored(static_cast<int>(slot)), parity);
    const int columns = (t.down ? p.down : p.up).column_tiles * Fp8Layer::kWriters;
    uint64_t* const flag = (t.down ? p.memory.y_done : p.memory.h_done) +
                           flag_of_tile(t.index, columns, t.tile.column_tile * Fp8Layer::kWriters + rank);
    if (lane() == 0) release_tile(c, flag);
    ptx::mbarrier_arrive(r.storage.taken(slot));
  }
}

/// Computes this warpgroup's unit of an up tile. `before`: scales_before() of the tile; `parity`: parity of the number of
/// earlier up tiles.
__device__ __forceinline__ void multiply_fp8_up(const FusedParams& p, const LayerStorage& r, gemm::Position& at, uint32_t entry,
                                                int before, uint32_t parity) {
  const gemm::ManySharedStorage<Fp8Up> storage = many_storage<Fp8Up>(r);
  gemm::UnitSums sums;
  gemm::multiply_unit(p.up, storage, at, sums, before);
  const Tile t = read_layer_tile(entry).tile;
  const int first = gemm::math_group() * gemm::kUnitRows + gemm::warp_of_group() * 16;
  gemm::store_warp_quantised(p.up, storage, t.row + first, static_cast<int>(t.shape >> 16) - first, t.column_tile, parity,
                             [&](int i) { return gemm::gated(p.up.gating, sums[i], sums[i + gemm::kBlockWeights / 4]); });
}
__device__ __forceinline__ void multiply_fp8_down(const FusedParams& p, const LayerStorage& r, gemm::Position& at,
                                                  uint32_t entry, int before) {
  const gemm::ManySharedStorage<Fp8Down> storage = many_storage<Fp8Down>(r);
  gemm::UnitSums sums;
  gemm::multiply_unit(p.down, storage, at, sums, before);
  const Tile t = read_layer_tile(entry).tile;
  const int first = gemm::math_group() * gemm::kUnitRows + gemm::warp_of_group() * 16;
  const int column = t.column_tile * Fp8Down::kColumns + static_cast<int>(ptx::cluster_rank()) * (Fp8Down::kColumns / 2);
  const uint32_t staging = storage.warp_staging(gemm::math_group() * 4 + gemm::warp_of_group()) + Fp8Down::kRowsAt;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    gemm::store_warp_rows(p.down, staging, t.row + first, static_cast<int>(t.shape >> 16) - first, column + half * 64,
                          [&](int i) { return sums[half * (gemm::kBlockWeights / 4) + i]; });
}

/// Role of each multiplying warp: gemm::multiply_many_tiles() for both products.
template <class A>
__device__ __forceinline__ void multiply_fp8_tiles(const FusedParams& p, const LayerStorage& r) {
  gemm::Position at;
  uint32_t parity = 0;
  if (gemm::math_group() == gemm::kManyGroups - 1) gemm::pass_turn();
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1), entry = r.storage.entry(slot);
    ptx::mbarrier_wait(r.storage.announced(slot), static_cast<uint32_t>(i >> 1 & 1));
    const int4 tile = ptx::load_shared_16(entry);
    const int width = __shfl_sync(~0u, tile.w & 0xffff, 0);
    if (width == static_cast<int>(gemm::kNoTile)) {
      if (gemm::math_group() == 0) gemm::take_turn();  // the last group passes it on
      return;
    }
    const bool down = __shfl_sync(~0u, tile.x >> 16, 0) != 0;
    const int before = scales_before(__shfl_sync(~0u, tile.z, 0));
    if (gemm::math_group() * gemm::kUnitRows < width) {
      const RoleSpan<A> span(down ? Event::expert_down : Event::expert_up);
      if (down) {
        multiply_fp8_down(p, r, at, entry, before);
      } else {
        multiply_fp8_up(p, r, at, entry, before, parity);
        parity ^= 1;
      }
      span.end(gemm::kUnitRows);
    } else {
      gemm::skip_unit(down ? p.down : p.up, many_storage<Fp8Up>(r), at);
    }
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(r.stored(static_cast<int>(slot)));
    ptx::mbarrier_arrive(r.storage.taken(slot));
  }
}

}  // namespace switchyard::detail::fused

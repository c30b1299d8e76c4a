// SPDX-License-Identifier: Apache-2.0
// The product roles of a block of the fp8 layer kernel: claiming, loading, multiplying, announcing. As in
// gemm/gpu/fp8/wide_kernel.cuh, two blocks form a cluster that processes the tiles of gemm/gpu/fp8/wide_tiles.hpp. Differences:
// tiles are loaded once their rows are ready, the scales are loaded as well and are laid out for box copies, and a warp
// announces stored tiles.
#pragma once

#include "exchange/fused/layer_storage.cuh"
#include "gemm/gpu/fp8/wide_kernel.cuh"

namespace switchyard::detail::fused {

inline constexpr int kFp8LoaderWarp = 8, kFp8ClaimerWarp = 9, kFp8AnnouncerWarp = 10, kFp8MoverWarp = 11;

/// Each warp stages 8 rows, either of a quantized group of 128 outputs or of 64 bf16 outputs.
template <gemm::Finish kFinish>
struct FusedFp8Kind : gemm::WideKind<kFinish, false> {
  static constexpr uint32_t kWarpStaging = 1024;
  static constexpr int kScaledRows = kFusedScaleBox;
};
/// A scale copy begins at a multiple of 16 bytes, up to this many rows before the tile.
__device__ __forceinline__ int scales_before(int row) { return row & 3; }
using Fp8Up = FusedFp8Kind<gemm::Finish::quantised>;
using Fp8Down = FusedFp8Kind<gemm::Finish::plain>;
/// Both kinds occupy the same space.
template <class K>
__device__ __forceinline__ gemm::WideStorage<K> wide_storage(const LayerStorage& r) {
  static_assert(gemm::kScaleBytes<K> == gemm::kScaleBytes<Fp8Up> &&
                gemm::WideStorage<K>::kStagesAt == gemm::WideStorage<Fp8Up>::kStagesAt);
  return gemm::WideStorage<K>(r.storage.base);
}

/// Claims the cluster's next tile, of ticket `ticket`. Skips the tickets of odd column tiles whose rows are shared: the tile of
/// the column tile before them covers them. Call from all lanes of the first block's claimer warp.
__device__ __forceinline__ LayerTile claim_fp8_tile(const LayerCall& c, const int* first_tiles, uint32_t& ticket) {
  for (;;) {
    ticket = static_cast<uint32_t>(take(&c.p.memory.counters->tickets, 1));
    const LayerTile t = layer_tile_of<Fp8Layer>(c.p, first_tiles, ticket);
    if (t.tile.shape == gemm::kNoTile || has_wide_tile(static_cast<int>(t.tile.shape & 0xffff), t.tile.column_tile)) return t;
  }
}
/// This block's part of a cluster's tile.
__device__ __forceinline__ LayerTile part_of_block(LayerTile t) {
  if (t.tile.shape == gemm::kNoTile) return t;
  const int width = static_cast<int>(t.tile.shape & 0xffff);
  const WidePart part =
      wide_part(static_cast<int>(t.tile.shape >> 16), width, t.tile.column_tile, static_cast<int>(ptx::cluster_rank()));
  t.tile.column_tile = part.column_tile;
  t.tile.row += part.first;
  t.tile.shape = static_cast<uint32_t>(part.width) | (shares_wide_rows(width) ? 0 : gemm::kSharesWeights) |
                 static_cast<uint32_t>(part.rows) << 16;
  return t;
}

/// Role of the warp that announces the cluster's tiles: like gemm::announce_tiles(), with layer tickets. It also waits for a
/// tile's rows while the previous tile is processed.
template <class A>
__device__ __forceinline__ void claim_fp8_tiles(const LayerCall& c, const int* first_tiles) {
  const LayerStorage& r = c.r;
  const gemm::WideStorage<Fp8Up> storage = wide_storage<Fp8Up>(r);
  const bool leads = ptx::cluster_rank() == 0;
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1), parity = static_cast<uint32_t>(i >> 1 & 1);
    if (i > 0) ptx::mbarrier_wait(storage.due(), static_cast<uint32_t>(i - 1) & 1);
    uint32_t ticket = 0;
    LayerTile t;
    if (leads) t = claim_fp8_tile(c, first_tiles, ticket);
    ptx::mbarrier_wait(storage.taken(slot), parity ^ 1);
    if (leads && lane() == 0)
      ptx::store_async(ptx::shared_of_block(storage.letter(slot), 1), ticket, ptx::shared_of_block(storage.sent(slot), 1));
    if (!leads) {
      if (lane() == 0) ptx::mbarrier_expect(storage.sent(slot), 4);
      __syncwarp();
      ptx::mbarrier_wait(storage.sent(slot), parity);
      t = layer_tile_of<Fp8Layer>(c.p, first_tiles, ptx::load_shared(storage.letter(slot)));
    }
    t = part_of_block(t);
    await_rows<A, Fp8Layer>(c, t);
    announce_tile(r, slot, t);
    if (t.tile.shape == gemm::kNoTile) return;
  }
}

/// Loads one stage: this block's part of the operands and all scales for this block.
template <class K>
__device__ __forceinline__ void load_fp8_stage(const gemm::GroupedParams& g, const FusedFp8Scales& scales, const Tile& t,
                                               const gemm::WideStorage<K>& storage, uint32_t slot, int block) {
  constexpr uint32_t kScalesOfRows = K::kScaledRows * 4, kScalesOfWeights = sizeof(float4);
  gemm::load_wide_stage(g, storage, t, slot, block, kScalesOfRows + kScalesOfWeights);
  const uint32_t bar = storage.full(slot);
  ptx::load_box(storage.scales(slot), &scales.rows, bar, t.row - scales_before(t.row), block);
  // A column tile past the last one has weights 0 and the scales of the last one.
  const int column_tile = t.column_tile < g.column_tiles ? t.column_tile : g.column_tiles - 1;
  const int64_t part = static_cast<int64_t>(t.expert) * g.column_tiles + column_tile;
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
        load_fp8_stage(p.down, p.down_scales, t.tile, wide_storage<Fp8Down>(r), slot, block);
      else
        load_fp8_stage(p.up, p.up_scales, t.tile, wide_storage<Fp8Up>(r), slot, block);
      if (++slot == gemm::WideStorage<Fp8Up>::kStages) slot = 0, parity ^= 1;
    }
  });
}

/// Role of the signaling warp: sets this block's flags of a tile (wide_flags()) once this block's part of the tile is stored. A
/// tile uses the barrier of its slot; the next tile in that slot begins only after this warp has released the entry.
/// A block whose wait has failed may have loaded invalid rows for the other block too. It sets no flags, so the row tile
/// remains incomplete. A block that alone sets the flags of the cluster's tile sets them only if no wait of either block has
/// failed.
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
    const int column_tiles = (t.down ? p.down : p.up).column_tiles, columns = column_tiles * Fp8Layer::kWriters;
    const bool shares_weights = (t.tile.shape & gemm::kSharesWeights) != 0;
    uint64_t* const flags =
        (t.down ? p.memory.y_done : p.memory.h_done) + flag_of_tile(t.index, columns, t.tile.column_tile * Fp8Layer::kWriters);
    const WideFlags own = wide_flags(shares_weights, t.tile.column_tile, column_tiles, rank);
    const bool failed = sets_flags_alone(shares_weights, t.tile.column_tile, column_tiles, rank) &&
                        ptx::load_of_block(ptx::shared_of_block(r.failed(), 1)) != 0;
    if (!failed && lane() < own.count) release_tile(c, flags + own.first + lane());
    __syncwarp();
    ptx::mbarrier_arrive(r.storage.taken(slot));
  }
}

/// Stores 64 columns, starting at `column`, of this warp's 16 rows, the first `rows` of which exist. `value(i)` is output i of
/// this thread.
template <class Value>
__device__ __forceinline__ void store_warp_rows(const gemm::GroupedParams& g, uint32_t staging, int64_t row, int rows,
                                                int column, Value value) {
  const int piece = lane() % 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto two = [&](int i) { return gemm::pack<__nv_bfloat16>(value(i + half * 2), value(i + half * 2 + 1)); };
    __syncwarp();  // the previous contents have been read
#pragma unroll
    for (int first = 0; first < 8; first += 4)
      ptx::store_matrices(staging + gemm::staged_at<8>(lane() & 7, first + lane() / 8), two(first * 4), two(first * 4 + 4),
                          two(first * 4 + 8), two(first * 4 + 12));
    __syncwarp();
#pragma unroll
    for (int in_half = lane() / 8; in_half < 8; in_half += 4) {
      const int i = half * 8 + in_half;
      if (i >= rows || column + piece * 8 >= g.columns) continue;
      *reinterpret_cast<int4*>(g.out + (row + i) * g.columns + column + piece * 8) =
          ptx::load_shared_16(staging + gemm::staged_at<8>(in_half, piece));
    }
  }
}

/// Computes and stores this warpgroup's unit of a tile, or its part of a shared unit. `before`: scales_before() of the tile.
template <class K, bool kShared>
__device__ __forceinline__ void multiply_fp8_tile(const gemm::GroupedParams& g, const LayerStorage& r, gemm::Position& at,
                                                  uint32_t entry, int before) {
  const gemm::WideStorage<K> storage = wide_storage<K>(r);
  gemm::WideSums sums;
  if constexpr (kShared)
    gemm::multiply_shared_unit(g, storage, at, sums, before);
  else
    gemm::multiply_wide_unit(g, storage, at, sums, before);
  const Tile t = read_layer_tile(entry).tile;
  const int first = (kShared ? 0 : gemm::math_group() * gemm::kUnitRows) + gemm::warp_of_group() * 16;
  const int rows = static_cast<int>(t.shape >> 16) - first;
  const uint32_t staging = storage.warp_staging(static_cast<int>(threadIdx.x >> 5));
  const auto value = [&](int i) { return gemm::gated(g.gating, sums.half[0][i], sums.half[1][i]); };
  if constexpr (K::kQuantised && kShared) {
    gemm::store_shared_quantised<K>(g, storage, t.row + first, rows, t.column_tile, value);
  } else if constexpr (K::kQuantised) {
    gemm::store_wide_quantised<K>(g, staging, t.row + first, rows, t.column_tile, value);
  } else {
    // In a shared unit, each warpgroup stores one quarter of the columns from each half.
#pragma unroll
    for (int i = 0; i < (kShared ? 2 : 4); ++i) {
      const int quarter = kShared ? 2 * i + gemm::math_group() : i;
      store_warp_rows(g, staging, t.row + first, rows, t.column_tile * K::kColumns + quarter * 64, [&](int j) {
        return kShared ? sums.half[i & 1][j] : sums.half[i / 2][i % 2 * (gemm::kHalfColumns / 4) + j];
      });
    }
  }
}

/// Role of each multiplying warp: gemm::multiply_wide_tiles() for both products.
template <class A>
__device__ __forceinline__ void multiply_fp8_tiles(const FusedParams& p, const LayerStorage& r) {
  gemm::Position at;
  if (gemm::math_group() == 1) gemm::pass_wide_turn();
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1), entry = r.storage.entry(slot);
    ptx::mbarrier_wait(r.storage.announced(slot), static_cast<uint32_t>(i >> 1 & 1));
    const int4 tile = ptx::load_shared_16(entry);
    const int width = __shfl_sync(~0u, tile.w & 0xffff, 0);
    if (width == static_cast<int>(gemm::kNoTile)) {
      if (gemm::math_group() == 0) gemm::take_wide_turn();  // consumes the other group's last pass
      return;
    }
    at.slot = __shfl_sync(~0u, at.slot, 0);  // provably uniform: see WideStorage::kStages
    const bool down = __shfl_sync(~0u, tile.x >> 16, 0) != 0;
    const int before = scales_before(__shfl_sync(~0u, tile.z, 0));
    const bool shared = gemm::wide_units(static_cast<uint32_t>(width)) == 1;
    const RoleSpan<A> span(down ? Event::expert_down : Event::expert_up);
    if (down && shared)
      multiply_fp8_tile<Fp8Down, true>(p.down, r, at, entry, before);
    else if (down)
      multiply_fp8_tile<Fp8Down, false>(p.down, r, at, entry, before);
    else if (shared)
      multiply_fp8_tile<Fp8Up, true>(p.up, r, at, entry, before);
    else
      multiply_fp8_tile<Fp8Up, false>(p.up, r, at, entry, before);
    span.end(shared ? gemm::kUnitRows / 2 : gemm::kUnitRows);
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(r.stored(static_cast<int>(slot)));
    ptx::mbarrier_arrive(r.storage.taken(slot));
  }
}

}  // namespace switchyard::detail::fused

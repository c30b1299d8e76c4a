// SPDX-License-Identifier: Apache-2.0
// The product roles of a block of the layer's kernel: claiming, loading, multiplying, storing. As in gemm/gpu/tile_roles.cuh,
// except that tiles are loaded once their rows are ready, and a separate warp stores and announces outputs, so the multiplying
// warps never wait for memory.
#pragma once

#include "exchange/fused/layer_storage.cuh"
#include "gemm/gpu/grouped_kernel.cuh"

namespace switchyard::detail::fused {

inline constexpr int kLoaderWarp = 8, kClaimerWarp = 9, kStorerWarp = 10, kMoverWarp = 11;

/// Role of the claimer warp: like gemm::claim_tiles, but also waits for a tile's rows while the previous tile is processed.
template <class A>
__device__ __forceinline__ void claim_layer_tiles(const LayerCall& c, const int* first_tiles) {
  const LayerStorage& r = c.r;
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1);
    if (i > 0) ptx::mbarrier_wait(r.storage.due(), static_cast<uint32_t>(i - 1) & 1);
    const auto ticket = static_cast<uint32_t>(take(&c.p.memory.counters->tickets, 1));
    const LayerTile t = layer_tile_of<Bf16Layer>(c.p, first_tiles, ticket);
    await_rows<A, Bf16Layer>(c, t);
    ptx::mbarrier_wait(r.storage.taken(slot), static_cast<uint32_t>(i >> 1 & 1) ^ 1);
    announce_tile(r, slot, t);
    if (t.tile.shape == gemm::kNoTile) return;
  }
}

/// Role of the loader warp.
template <class Up, class Down>
__device__ __forceinline__ void load_layer_tiles(const LayerCall& c) {
  const FusedParams& p = c.p;
  const LayerStorage& r = c.r;
  uint32_t slot = 0, parity = 1;
  for_each_layer_tile(r, [&](const LayerTile& t) {
    if (lane() != 0) return;
    ptx::fence_proxy_async_global();
    const gemm::GroupedParams& product = t.down ? p.down : p.up;
    const int due_at = product.inner_blocks > kClaimedAhead ? product.inner_blocks - kClaimedAhead : 0;
    for (int block = 0; block < product.inner_blocks; ++block) {
      if (block == due_at) ptx::mbarrier_arrive(r.storage.due());
      ptx::mbarrier_wait(r.storage.empty(slot), parity);
      if (t.down)
        gemm::load_stage<Down>(p.down, t.tile, r.storage.stage(slot), r.storage.full(slot), block);
      else
        gemm::load_stage<Up>(p.up, t.tile, r.storage.stage(slot), r.storage.full(slot), block);
      if (++slot == r.storage.num_stages()) slot = 0, parity ^= 1;
    }
  });
}

/// Stores rows of `kColumns` outputs staged by a warpgroup. Called by the storer warp.
template <int kColumns>
__device__ __forceinline__ void store_staged(const gemm::GroupedParams& g, const Tile& t, uint32_t staging, int column) {
  constexpr int kPiecesOfRow = kColumns / 8;
  const int rows = static_cast<int>(t.shape >> 16), wide = rows / 64, boxes = wide + rows % 64 / 16;
  if (lane() == 0) {
    for (int b = 0; b < boxes; ++b) {
      const int first = b < wide ? b * 64 : wide * 48 + b * 16;
      ptx::store_box(b < wide ? &g.out_64 : &g.out_16, staging + static_cast<uint32_t>(first * kPiecesOfRow) * 16, column,
                     t.row + first);
    }
    ptx::bulk_commit();
  }
  const int in_boxes = rows & ~15;  // the last rows of an expert; the rows after them belong to the next expert
  for (int i = in_boxes * kPiecesOfRow + lane(); i < rows * kPiecesOfRow; i += 32) {
    const int row = i / kPiecesOfRow, piece = i % kPiecesOfRow;
    if (column + piece * 8 >= g.columns) continue;
    *reinterpret_cast<int4*>(g.out + static_cast<int64_t>(t.row + row) * g.columns + column + piece * 8) =
        ptx::load_shared_16(staging + gemm::staged_at<kPiecesOfRow>(row, piece));
  }
}

/// Role of the storer warp: receives each tile in two halves from both warpgroups and sets the tile's flag once it is fully
/// stored.
template <class Up, class Down>
__device__ __forceinline__ void store_layer_tiles(const LayerCall& c) {
  const FusedParams& p = c.p;
  const LayerStorage& r = c.r;
  uint32_t parity = 0;
  for_each_layer_tile(r, [&](const LayerTile& t) {
    for (int half = 0; half < 2; ++half, parity ^= 1) {
      for (uint32_t left = 3; left != 0;) {
        for (int g = 0; g < 2; ++g) {
          if ((left >> g & 1) == 0) continue;
          if (!__all_sync(~0u, ptx::mbarrier_try_wait(r.staged(g), parity))) continue;
          left &= ~(1u << g);
          constexpr int kUp = Up::kColumns / 4, kDown = Down::kColumns / 4;
          if (t.down)
            store_staged<kDown>(p.down, t.tile, r.storage.staging(g),
                                t.tile.column_tile * Down::kColumns + (g * 2 + half) * kDown);
          else
            store_staged<kUp>(p.up, t.tile, r.storage.staging(g), t.tile.column_tile * Up::kColumns + (g * 2 + half) * kUp);
          __syncwarp();
          if (lane() == 0) {
            ptx::bulk_wait_read();
            ptx::mbarrier_arrive(r.stored(g));
          }
        }
      }
    }
    if (lane() == 0) ptx::bulk_wait();
    __syncwarp();
    const int columns = (t.down ? p.down : p.up).column_tiles;
    uint64_t* const flag = (t.down ? p.memory.y_done : p.memory.h_done) + flag_of_tile(t.index, columns, t.tile.column_tile);
    if (lane() == 0) release_tile(c, flag);
  });
}

/// Hands half of this warpgroup's accumulators to the storer warp.
template <class K, int kWidth>
__device__ __forceinline__ void hand_half(const gemm::GroupedParams& g, const LayerStorage& r, uint32_t& parity,
                                          const float (&d)[kWidth / 2]) {
  constexpr int kColumns = K::kColumns / 4;
  const int group = gemm::math_group();
  ptx::mbarrier_wait(r.stored(group), parity ^ 1);
  parity ^= 1;
  gemm::stage_outputs<K, kWidth, kColumns>(r.storage.staging(group), [&](int i) {
    if constexpr (K::kInterleaved)
      return gemm::interleaved_output<kWidth>(g, d, i);
    else
      return gemm::activated<K>(g, d[i]);
  });
  ptx::fence_proxy_async_shared();
  ptx::mbarrier_arrive(r.staged(group));
}

/// Like gemm::multiply_tile with gemm::finish_by_halves, except for the last step.
template <class K, int kWidth>
__device__ __forceinline__ void multiply_layer_tile(const gemm::GroupedParams& g, const LayerStorage& r, gemm::Position& at,
                                                    uint32_t& handed) {
  float d[2][kWidth / 2];
  gemm::multiply_block<K, kWidth, true>(r.storage, at, d);
  for (int block = 3; block < g.inner_blocks; ++block) gemm::multiply_block<K, kWidth, false>(r.storage, at, d);
  gemm::Operands s[2];
  uint32_t slots[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if (half == 0) {
        s[block] = gemm::next_stage(r.storage, at);
        slots[block] = at.slot;
        gemm::advance(r.storage, at);
      }
#pragma unroll
      for (int step = 0; step < gemm::kInner / 16; ++step) gemm::multiply<K, kWidth, false>(d[half], s[block], half, step);
    }
    ptx::wgmma_commit();
  }
  ptx::wgmma_wait<1>();
  ptx::keep(d[0]);
  hand_half<K, kWidth>(g, r, handed, d[0]);
  ptx::wgmma_wait<0>();
  gemm::release_stage(r.storage, slots[0]);
  gemm::release_stage(r.storage, slots[1]);
  ptx::keep(d[1]);
  hand_half<K, kWidth>(g, r, handed, d[1]);
}

}  // namespace switchyard::detail::fused

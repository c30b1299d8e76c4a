// SPDX-License-Identifier: Apache-2.0
// Scales for the fp8 kernels: dedicated threads load the scales of rows and weights into shared memory, one stage or, with
// scales per channel, one tile at a time.
//
// K, a kernel's kind, has members in addition to those listed in tile_roles.cuh. kScaling is the granularity of the scales. K
// has kScaleThreads threads that load scales, starting at kFirstScaleThread, kScaledRows rows in its largest tile, and
// kWeightScales weight scales per stage. weight_scale(p, t, i) is the row of the i-th weight scale; channel(p, t, i) is the
// index of the scale of the tile's weight i, or -1 if there is no such weight.
#pragma once

#include "gemm/gpu/tile_roles.cuh"

namespace switchyard::detail::gemm {

/// Whether stages have scales, and whether tiles have them.
template <class K>
inline constexpr bool kStageScales = K::kScaling != ScaleGranularity::per_channel;
template <class K>
inline constexpr bool kTileScales = K::kScaling != ScaleGranularity::block;
/// Number of arrivals that fill a stage, including that of the copies.
template <class K>
inline constexpr uint32_t kStageLoaders = kStageScales<K> ? 1 + K::kScaleThreads : 1;

/// Size in bytes of a stage's scales: those of its rows, followed by those of its weights. It is a multiple of 128, as box
/// copies require.
template <class K>
inline constexpr uint32_t kScaleBytes = kStageScales<K> ? (K::kScaledRows * 4 + 32 + 127) / 128 * 128 : 0;
template <class K>
inline constexpr uint32_t kWeightScalesAt = K::kScaledRows * 4;

/// Size in bytes of a tile's scales: those of its weights, followed by those of its rows (per_channel).
template <class K>
inline constexpr uint32_t kTileScaleBytes = kTileScales<K> ? (kTileColumns + K::kScaledRows) * 4 : 0;
inline constexpr uint32_t kTileRowScalesAt = kTileColumns * 4;

__device__ __forceinline__ float scale_at(const std::byte* p, bool ue8m0) {
  return ue8m0 ? f32_from_ue8m0(static_cast<uint8_t>(*p)) : *reinterpret_cast<const float*>(p);
}

/// A thread's scales for four stages: those of rows i, i + kScaleThreads, ... of the tile; the first threads also hold a weight
/// scale.
template <class K>
struct FourScales {
  static constexpr int kRows = K::kScaledRows / K::kScaleThreads;
  float4 rows[kRows];
  float4 weight;
};
/// Addresses of a tile's scales. `weights` is the address for this thread, or null.
struct TileScales {
  const std::byte* rows;
  const std::byte* weights;
  int count;  ///< number of rows
};
template <class K>
__device__ __forceinline__ TileScales scales_of_tile(const GroupedParams& p, const Tile& t, int thread) {
  const Fp8Scales& s = p.scales;
  const int64_t row = s.rows_of_expert ? t.row - first_row_of(p.ranges, t.expert) : t.row;
  TileScales of{s.rows + t.expert * s.expert + row * s.row, nullptr, static_cast<int>(t.shape >> 16)};
  if (thread >= K::kWeightScales) return of;
  const int given = K::weight_scale(p, t, thread);
  const int inside = given < s.weight_rows ? given : s.weight_rows - 1;
  of.weights =
      s.weights + (static_cast<int64_t>(t.expert) * s.weight_rows + inside) * p.inner_blocks * (s.weights_ue8m0 ? 1 : 4);
  return of;
}
__device__ __forceinline__ float4 four_from_ue8m0(uint32_t bytes) {
  const auto one = [&](int i) { return f32_from_ue8m0(static_cast<uint8_t>(bytes >> (8 * i))); };
  return {one(0), one(1), one(2), one(3)};
}
/// Scales of blocks [block, block + 4), `stride` bytes apart, of which `left` exist.
__device__ __forceinline__ float4 four_scales(const std::byte* p, int64_t stride, int left, bool ue8m0) {
  const auto one = [&](int i) { return i < left ? scale_at(p + i * stride, ue8m0) : 0.F; };
  return {one(0), one(1), one(2), one(3)};
}
/// `block` is a multiple of 4. Rows of scales are aligned to 16 bytes and packed words to 4, including padding, so that four
/// scales of a row take one load. The exception is column-major float32, where the loads of a warp are contiguous.
template <class K>
__device__ __forceinline__ FourScales<K> read_scales(const GroupedParams& p, const TileScales& tile, int block, int thread) {
  FourScales<K> found{};
  const int left = p.inner_blocks - block;
  if (left <= 0) return found;
  const Fp8Scales& s = p.scales;
  const std::byte* const at = tile.rows + (block >> s.packed) * s.block;
#pragma unroll
  for (int i = 0; i < FourScales<K>::kRows; ++i) {
    const int row = thread + i * K::kScaleThreads;
    if (row >= tile.count) continue;
    const std::byte* const own = at + row * s.row;
    if (s.ue8m0)
      found.rows[i] = four_from_ue8m0(*reinterpret_cast<const uint32_t*>(own));
    else if (!s.rows_of_expert)
      found.rows[i] = *reinterpret_cast<const float4*>(own);
    else
      found.rows[i] = four_scales(own, s.block, left, false);
  }
  if (tile.weights != nullptr) {
    const int64_t stride = s.weights_ue8m0 ? 1 : 4;
    found.weight = four_scales(tile.weights + block * stride, stride, left, s.weights_ue8m0);
  }
  return found;
}
__device__ __forceinline__ uint32_t bits_of(const float4& v, int i) {
  return __float_as_uint(i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w);
}

/// Loads the scales of the tile in slot `slot` to `storage.tile_scales(slot)`. The slot is free: the tile was announced after
/// all readers had taken the slot's previous tile, and math warps take a tile after their last access to its scales.
template <class K, class AnyStorage>
__device__ __forceinline__ void load_tile_scales(const GroupedParams& p, const AnyStorage& storage, const Tile& t,
                                                 const TileScales& tile, int thread, uint32_t slot) {
  const auto* const channels =
      reinterpret_cast<const float*>(p.scales.weights) + static_cast<int64_t>(t.expert) * p.scales.weight_rows;
  const uint32_t to = storage.tile_scales(slot);
#pragma unroll
  for (int i = thread; i < kTileColumns; i += K::kScaleThreads) {
    const int channel = K::channel(p, t, i);
    ptx::store_shared(to + static_cast<uint32_t>(i) * 4, __float_as_uint(channel < 0 ? 0.F : channels[channel]));
  }
  if constexpr (!kStageScales<K>) {
#pragma unroll
    for (int i = thread; i < K::kScaledRows; i += K::kScaleThreads) {
      const float scale = i < tile.count ? scale_at(tile.rows + i * p.scales.row, false) : 0.F;
      ptx::store_shared(to + kTileRowScalesAt + static_cast<uint32_t>(i) * 4, __float_as_uint(scale));
    }
  }
  ptx::mbarrier_arrive(storage.scaled(slot));
}
/// Waits for the scales of a block's tile number `tile` and returns their address.
template <class AnyStorage>
__device__ __forceinline__ uint32_t wait_tile_scales(const AnyStorage& storage, uint32_t tile) {
  ptx::mbarrier_wait(storage.scaled(tile & 1), tile >> 1 & 1);
  return storage.tile_scales(tile & 1);
}
/// Call after make_barriers(), from all threads; a barrier of the block must follow.
template <class K, class AnyStorage>
__device__ __forceinline__ void make_scale_barriers(const AnyStorage& storage) {
  if (!kTileScales<K> || threadIdx.x != 0) return;
  ptx::mbarrier_init(storage.scaled(0), K::kScaleThreads);
  ptx::mbarrier_init(storage.scaled(1), K::kScaleThreads);
  ptx::fence_mbarrier_init();
}

/// Role of the scale threads. They read the scales of the next four stages before waiting for the current four, because memory
/// latency exceeds the duration of a stage. `storage.scales(slot)` is the destination for a stage.
template <class K, class AnyStorage>
__device__ __forceinline__ void load_scales(const GroupedParams& p, const AnyStorage& storage) {
  const int thread = static_cast<int>(threadIdx.x) - K::kFirstScaleThread;
  uint32_t slot = 0, parity = 1, tile_slot = 0;
  for_each_tile(storage, [&](const Tile& t) {
    const TileScales tile = scales_of_tile<K>(p, t, thread);
    if constexpr (kTileScales<K>) {
      load_tile_scales<K>(p, storage, t, tile, thread, tile_slot);
      tile_slot ^= 1;
      if constexpr (!kStageScales<K>) return;
    }
    FourScales<K> next = read_scales<K>(p, tile, 0, thread);
#pragma unroll 1
    for (int first = 0; first < p.inner_blocks; first += 4) {
      const FourScales<K> now = next;
      next = read_scales<K>(p, tile, first + 4, thread);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (first + j >= p.inner_blocks) continue;
        ptx::mbarrier_wait(storage.empty(slot), parity);
        const uint32_t scales = storage.scales(slot);
#pragma unroll
        for (int k = 0; k < FourScales<K>::kRows; ++k)
          ptx::store_shared(scales + static_cast<uint32_t>(thread + k * K::kScaleThreads) * 4, bits_of(now.rows[k], j));
        if (thread < K::kWeightScales)
          ptx::store_shared(scales + kWeightScalesAt<K> + static_cast<uint32_t>(thread) * 4, bits_of(now.weight, j));
        ptx::mbarrier_arrive(storage.full(slot));
        if (++slot == storage.num_stages()) slot = 0, parity ^= 1;
      }
    }
  });
}

}  // namespace switchyard::detail::gemm

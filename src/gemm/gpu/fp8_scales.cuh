// SPDX-License-Identifier: Apache-2.0
// Scales of the fp8 kernels: the threads that bring those of rows and weights into shared memory, a stage's at a time.
//
// K, a kernel's kind, has beside what tile_roles.cuh says: kScaleThreads, from kFirstScaleThread on; kScaledRows of its widest
// tile; kWeightScales of a stage, and weight_scale(p, t, i), which of the rows of weight scales is number i.
#pragma once

#include "gemm/gpu/tile_roles.cuh"

namespace switchyard::detail::gemm {

/// Of a stage: scales of its rows, then of its weights.
template <class K>
inline constexpr uint32_t kScaleBytes = K::kScaledRows * 4 + 32;
template <class K>
inline constexpr uint32_t kWeightScalesAt = K::kScaledRows * 4;

__device__ __forceinline__ float scale_at(const std::byte* p, bool ue8m0) {
  return ue8m0 ? f32_from_ue8m0(static_cast<uint8_t>(*p)) : *reinterpret_cast<const float*>(p);
}

/// What a thread brings of one stage: scales of rows i, i + kScaleThreads, ... of the tile; the first threads one of the
/// weights.
template <class K>
struct StageScales {
  static constexpr int kRows = K::kScaledRows / K::kScaleThreads;
  float rows[kRows];
  float weight;
};
/// Where a tile's scales are. `weights`: of this thread, or null.
struct TileScales {
  const std::byte* rows;
  const std::byte* weights;
  int count;  ///< of rows
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
template <class K>
__device__ __forceinline__ StageScales<K> read_scales(const GroupedParams& p, const TileScales& tile, int block, int thread) {
  StageScales<K> found{};
  if (block >= p.inner_blocks) return found;
  const Fp8Scales& s = p.scales;
  const std::byte* const at = tile.rows + (block >> s.packed) * s.block + (block & ((1 << s.packed) - 1));
#pragma unroll
  for (int i = 0; i < StageScales<K>::kRows; ++i) {
    const int row = thread + i * K::kScaleThreads;
    if (row < tile.count) found.rows[i] = scale_at(at + row * s.row, s.ue8m0);
  }
  if (tile.weights != nullptr) found.weight = scale_at(tile.weights + block * (s.weights_ue8m0 ? 1 : 4), s.weights_ue8m0);
  return found;
}

/// The threads that bring scales. They read kAhead stages at once, before the stages for which they wait: memory answers later
/// than a stage takes. `room.scales(slot)` is where a stage's scales go.
template <class K, class AnyRoom>
__device__ __forceinline__ void load_scales(const GroupedParams& p, const AnyRoom& room) {
  constexpr int kAhead = 3;
  const int thread = static_cast<int>(threadIdx.x) - K::kFirstScaleThread;
  uint32_t slot = 0, parity = 1;
  for (int i = 0;; ++i) {
    const uint32_t entry = static_cast<uint32_t>(i & 1);
    ptx::mbarrier_wait(room.told(entry), static_cast<uint32_t>(i >> 1 & 1));
    const Tile t = read_entry(room.entry(entry));
    if (t.shape == kNoTile) break;
    ptx::mbarrier_arrive(room.taken(entry));
    const TileScales tile = scales_of_tile<K>(p, t, thread);
    StageScales<K> next[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) next[j] = read_scales<K>(p, tile, j, thread);
#pragma unroll 1
    for (int first = 0; first < p.inner_blocks; first += kAhead) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const StageScales<K> now = next[j];
        next[j] = read_scales<K>(p, tile, first + kAhead + j, thread);
        if (first + j >= p.inner_blocks) continue;
        ptx::mbarrier_wait(room.empty(slot), parity);
        const uint32_t scales = room.scales(slot);
#pragma unroll
        for (int k = 0; k < StageScales<K>::kRows; ++k)
          ptx::store_shared(scales + static_cast<uint32_t>(thread + k * K::kScaleThreads) * 4, __float_as_uint(now.rows[k]));
        if (thread < K::kWeightScales)
          ptx::store_shared(scales + kWeightScalesAt<K> + static_cast<uint32_t>(thread) * 4, __float_as_uint(now.weight));
        ptx::mbarrier_arrive(room.full(slot));
        if (++slot == room.num_stages()) slot = 0, parity ^= 1;
      }
    }
  }
}

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
// The block of the layer's kernel: shared memory, tiles by tickets, waits.
//
// Tickets count tiles: of step s those of expert s up, then those of expert s - lag down. A tile up waits for its rows, which
// come by pulls, which wait for nobody's tickets; a tile down waits for tiles up with lower tickets.
#pragma once

#include "fused/layer_params.hpp"
#include "gemm/gpu/tile_roles.cuh"

namespace switchyard::detail::fused {

using gemm::lane;
using gemm::Room;
using gemm::Tile;

/// Sites of waits, for faults.
enum class Wait : uint64_t { told = 1, arrived, h_done, y_done, returned };

/// What a block has besides the Room of its products.
struct LayerRoom {
  Room room;
  uint32_t pieces;  ///< kPieces buffers of kPieceBytes

  __device__ uint32_t staged(int group) const { return room.base + 336 + 8 * static_cast<uint32_t>(group); }
  __device__ uint32_t stored(int group) const { return room.base + 352 + 8 * static_cast<uint32_t>(group); }
  __device__ uint32_t come(uint32_t piece) const { return room.base + 368 + 8 * piece; }
  __device__ uint32_t failed() const { return room.base + 400; }
  __device__ uint32_t piece(uint32_t i) const { return pieces + i * kPieceBytes; }
};

/// A tile in 16 bytes of shared memory: expert | down << 16; index of the row tile << 12 | column tile; first row; shape.
struct LayerTile {
  Tile tile;
  bool down;
  int index;  ///< of the row tile among all of the rank
};
__device__ __forceinline__ LayerTile read_layer_tile(uint32_t entry) {
  const int4 e = ptx::load_shared_16(entry);
  return {{e.x & 0xffff, e.y & 0xfff, e.z, static_cast<uint32_t>(e.w)}, (e.x >> 16) != 0, static_cast<int>(static_cast<uint32_t>(e.y) >> 12)};
}
__device__ __forceinline__ void write_layer_tile(uint32_t entry, const LayerTile& t) {
  ptx::store_shared_16(entry, {t.tile.expert | (t.down ? 1 << 16 : 0), t.index << 12 | t.tile.column_tile, t.tile.row,
                               static_cast<int>(t.tile.shape)});
}

/// first_tiles[e]: row tiles of the experts before e; the last one: of all. All threads; ends with a barrier of all.
__device__ __forceinline__ void count_row_tiles_of(const LayerParams& p, int* first_tiles) {
  const int experts = p.up.num_experts;
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x))
    first_tiles[e] = count_row_tiles(gemm::rows_of(p.up.ranges, e), kWidest);
  __syncthreads();
  gemm::sum_before(first_tiles, experts);
  __syncthreads();
}

/// Tickets before those of step `step`.
__device__ __forceinline__ int step_tickets(const LayerParams& p, const int* first_tiles, int step) {
  const int e = p.up.num_experts, up = step < e ? step : e, late = step - p.lag, down = late < 0 ? 0 : late < e ? late : e;
  return p.up.column_tiles * first_tiles[up] + p.down.column_tiles * first_tiles[down];
}

__device__ __forceinline__ LayerTile layer_tile_of(const LayerParams& p, const int* first_tiles, uint32_t ticket) {
  const int experts = p.up.num_experts;
  if (ticket >= static_cast<uint32_t>(step_tickets(p, first_tiles, experts + p.lag))) return {{0, 0, 0, gemm::kNoTile}, false, 0};
  int low = 0, high = experts + p.lag;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (static_cast<uint32_t>(step_tickets(p, first_tiles, middle)) <= ticket)
      low = middle;
    else
      high = middle;
  }
  int at = static_cast<int>(ticket) - step_tickets(p, first_tiles, low), expert = low;
  bool down = true;
  if (low < experts) {
    const int ups = p.up.column_tiles * (first_tiles[low + 1] - first_tiles[low]);
    down = at >= ups;
    if (down) at -= ups;
  }
  if (down) expert = low - p.lag;
  const int64_t rows = gemm::rows_of(p.up.ranges, expert);
  const TilePlace place = tile_place(at, count_row_tiles(rows, kWidest), (down ? p.down : p.up).column_tiles);
  const RowTile t = row_tile(rows, place.row_tile, kWidest);
  return {{expert, place.column_tile, static_cast<int>(gemm::first_row_of(p.up.ranges, expert) + t.first),
           static_cast<uint32_t>(t.width) | static_cast<uint32_t>(t.rows) << 16},
          down,
          first_tiles[expert] + place.row_tile};
}

/// All lanes of a warp: until ready() holds in every lane. False, and recorded, after the deadline or once the rank has failed:
/// then all waits of the block end at once.
template <class Ready>
__device__ __forceinline__ bool wait_until(const LayerParams& p, const LayerRoom& r, Wait site, Ready ready) {
  if (__all_sync(~0u, ready())) return true;
  const uint64_t begin = ptx::global_timer();
  for (uint32_t polls = 1;; ++polls) {
    if (__all_sync(~0u, ready())) return true;
    if ((polls & 63) != 0) continue;
    bool over = false;
    if (lane() == 0) {
      over = ptx::load_shared(r.failed()) != 0 || ptx::load_relaxed<Scope::device>(p.fault) != 0;
      if (!over && ptx::global_timer() - begin > p.timeout_ns) {
        over = true;
        atomicCAS(reinterpret_cast<unsigned long long*>(p.fault), 0ull, static_cast<unsigned long long>(site));
      }
      if (over) ptx::store_shared(r.failed(), 1);
    }
    if (__any_sync(~0u, over)) return false;
  }
}

/// The next of the indices 0, 1, 2, ..., `count` at a time; all lanes.
__device__ __forceinline__ int64_t take(uint64_t* counter, int count) {
  uint64_t i = 0;
  if (lane() == 0) i = ptx::add_relaxed(counter, static_cast<uint64_t>(count));
  return static_cast<int64_t>(__shfl_sync(~0u, i, 0));
}

}  // namespace switchyard::detail::fused

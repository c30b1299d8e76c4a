// SPDX-License-Identifier: Apache-2.0
// Shared memory, ticketed tiles and waits of a block of the layer's kernel.
//
// protocol/fused/tickets.hpp defines tickets and what their tiles wait for.
#pragma once

#include "arch/cuda/cuda_lane.cuh"
#include "arch/cuda/cuda_traced.cuh"
#include "exchange/fused/launch.hpp"
#include "gemm/gpu/fp8/wide_tiles.hpp"
#include "gemm/gpu/tile_roles.cuh"
#include "protocol/fused/tickets.hpp"
#include "protocol/wait.hpp"

namespace switchyard::detail::fused {

using gemm::lane;
using gemm::SharedStorage;
using gemm::Tile;

/// Constants of the bf16 and fp8 kernels: threads per block, rows of the largest tile, and number of flags per column
/// tile, one for each block that computes a tile.
struct Bf16Layer {
  static constexpr int kThreads = gemm::kThreads, kRows = kFusedRows, kWriters = 1;
  static constexpr bool kFp8 = false;
  static __device__ int count(int64_t rows) { return count_row_tiles(rows, kRows); }
  static __device__ RowTile tile(int64_t rows, int index) { return row_tile(rows, index, kRows); }
};
struct Fp8Layer {
  static constexpr int kThreads = gemm::kThreads, kRows = kFusedFp8Rows, kWriters = kWideFlags;
  static constexpr bool kFp8 = true;
  static __device__ int count(int64_t rows) { return count_wide_row_tiles(rows); }
  static __device__ RowTile tile(int64_t rows, int index) { return wide_row_tile(rows, index); }
};

/// Number of stages before the end of a tile at which the next tile is claimed: obtaining a ticket, its tile and the flags of
/// its rows takes about 5 µs.
inline constexpr int kClaimedAhead = 16;

/// Offset of the block's current token part: after its barriers, within kFixedBytes.
inline constexpr uint32_t kPartAt = 768;
/// fp8: offset of the word that contains the cluster's failure. It is separate from the token part because threads of the block
/// may still read the last part when this word is written.
inline constexpr uint32_t kClusterFailedAt = kPartAt + 4;

/// Shared memory of a block, excluding the products' space, of which only the beginning is used here.
struct LayerStorage {
  SharedStorage storage;
  uint32_t pieces;  ///< kPieceStorageBytes bytes

  __device__ uint32_t staged(int group) const { return storage.base + 640 + 8 * static_cast<uint32_t>(group); }
  __device__ uint32_t stored(int i) const { return storage.base + 656 + 8 * static_cast<uint32_t>(i); }
  __device__ uint32_t row_arrived(uint32_t slot) const { return storage.base + 800 + 8 * slot; }  ///< kMaxSlots barriers
  __device__ uint32_t failed() const { return storage.base + 704; }
  __device__ uint32_t call() const { return storage.base + 720; }
};

/// A tile in 16 bytes of shared memory: expert | down << 16; index of the row tile << 12 | column tile; first row; shape.
struct LayerTile {
  Tile tile;
  bool down;
  int index;  ///< index of the row tile among all row tiles of the rank
};
__device__ __forceinline__ LayerTile read_layer_tile(uint32_t entry) {
  const int4 e = ptx::load_shared_16(entry);
  return {{e.x & 0xffff, e.y & 0xfff, e.z, static_cast<uint32_t>(e.w)},
          (e.x >> 16) != 0,
          static_cast<int>(static_cast<uint32_t>(e.y) >> 12)};
}
__device__ __forceinline__ void write_layer_tile(uint32_t entry, const LayerTile& t) {
  ptx::store_shared_16(entry, {t.tile.expert | (t.down ? 1 << 16 : 0), t.index << 12 | t.tile.column_tile, t.tile.row,
                               static_cast<int>(t.tile.shape)});
}

/// Sets first_tiles[e] to the number of row tiles of the experts before e, and the last entry to the total number of row tiles.
/// Call from all threads; ends with `__syncthreads()`.
template <class L>
__device__ __forceinline__ void count_row_tiles_of(const FusedParams& p, int* first_tiles) {
  const int experts = p.up.num_experts;
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x))
    first_tiles[e] = L::count(gemm::rows_of(p.up.ranges, e));
  __syncthreads();
  gemm::sum_before(first_tiles, experts);
  __syncthreads();
}

/// `first_tiles`: from count_row_tiles_of().
__device__ __forceinline__ TicketOrder ticket_order(const FusedParams& p, const int* first_tiles) {
  return {first_tiles, p.up.num_experts, p.lag, p.parts.up ? p.up.column_tiles : 0, p.parts.down ? p.down.column_tiles : 0};
}

template <class L>
__device__ __forceinline__ LayerTile layer_tile_of(const FusedParams& p, const int* first_tiles, uint32_t ticket) {
  const TicketOrder order = ticket_order(p, first_tiles);
  if (ticket >= static_cast<uint32_t>(count_tickets(order))) return {{0, 0, 0, gemm::kNoTile}, false, 0};
  const TicketPlace tile = ticket_place(order, ticket);
  const int64_t rows = gemm::rows_of(p.up.ranges, tile.expert);
  const TilePlace place = tile_place(tile.at, L::count(rows), (tile.down ? p.down : p.up).column_tiles);
  const RowTile t = L::tile(rows, place.row_tile);
  return {{tile.expert, place.column_tile, static_cast<int>(gemm::first_row_of(p.up.ranges, tile.expert) + t.first),
           static_cast<uint32_t>(t.width) | static_cast<uint32_t>(t.rows) << 16},
          tile.down,
          first_tiles[tile.expert] + place.row_tile};
}

/// Values of a call that are known only on the device. They are kept in 24 bytes of shared memory because the multiplying warps
/// have no registers left.
struct LayerCall {
  const FusedParams& p;
  const LayerStorage& r;
  uint64_t word;  ///< of the call's flags
  int64_t tokens, rows;

  __device__ __forceinline__ LayerCall(const FusedParams& params, const LayerStorage& storage) : p(params), r(storage) {
    const int4 a = ptx::load_shared_16(r.call()), b = ptx::load_shared_16(r.call() + 16);
    word = static_cast<uint32_t>(a.x) | static_cast<uint64_t>(static_cast<uint32_t>(a.y)) << 32;
    tokens = static_cast<uint32_t>(a.z);
    rows = b.x;
  }
  __device__ static void write(const LayerStorage& r, uint64_t word, int64_t tokens, int64_t rows) {
    ptx::store_shared_16(r.call(), {static_cast<int>(word), static_cast<int>(word >> 32), static_cast<int>(tokens), 0});
    ptx::store_shared_16(r.call() + 16, {static_cast<int>(rows), 0, 0, 0});
  }
};

/// On an arch that traces, records a span on this warp's track from construction to end(). Call from all lanes.
template <class A>
class RoleSpan {
 public:
  __device__ __forceinline__ explicit RoleSpan(Event event) : event_(event) {
    if constexpr (requires { A::kDeviceTracing; }) begin_ = A::ticks();
  }
  __device__ __forceinline__ void end(int64_t arg, uint32_t bytes = 0) const {
    if constexpr (requires { A::kDeviceTracing; }) A::record(static_cast<uint16_t>(event_), begin_, A::ticks(), arg, bytes);
  }

 private:
  Event event_;
  uint64_t begin_ = 0;
};

/// A lane of this call, for the bounded wait.
__device__ __forceinline__ CudaLane::Warp waiting_lane(const LayerCall& c) { return CudaLane::Warp(c.word >> kFlagValueBits); }

/// The progress of a wait whose first poll failed. Call from one lane.
class LayerWait {
 public:
  __device__ __forceinline__ explicit LayerWait(uint64_t begin) : begin_(begin) {}

  /// The `look`-th check of a wait for rank `rank`, whose flag is `seen`. Returns false if the wait has ended: the fault is
  /// recorded and published to all ranks, and all waits of the block end at their next check. The check that finds the end of a
  /// wait precedes its last polls, so that data that a rank delivered before it left still ends the wait with success.
  __device__ __forceinline__ bool keep_waiting(const LayerCall& c, Site site, int rank, uint64_t seen, int look) {
    if (ptx::load_shared(c.r.failed()) != 0) return false;
    CudaLane::Warp w = waiting_lane(c);
    if (!ending_) {
      ending_ = !DeadlineCheck<CudaLane>{}(w, &c.p.call, rank, begin_, look);
      return true;
    }
    ending_ = false;
    if (end_wait<CudaLane>(w, c.p.call, site, c.word, rank, begin_, [&] { return seen; })) return true;
    ptx::store_shared(c.r.failed(), 1);
    return false;
  }

 private:
  uint64_t begin_;
  bool ending_ = false;  ///< only the polls until the next check are left
};

/// The writers of the flags that a warp waits for.
enum class Awaited { this_rank, ranks };

/// Waits until the flag of every lane has reached this call's epoch: seen() returns the value of the lane's flag, or c.word if
/// the lane waits for none. Each lane waits for its own `rank`. Call from all lanes of a warp. Returns false after a (recorded)
/// fault: the awaited data may be missing. Time spent waiting for ranks is charged to the last other rank waited for.
template <class A, Awaited kAwaited = Awaited::ranks, class Seen>
__device__ __forceinline__ bool wait_until(const LayerCall& c, Site site, Event event, int rank, Seen seen) {
  if (__all_sync(~0u, flag_reached(seen(), c.word))) return true;
  const RoleSpan<A> span(event);
  const uint64_t begin = ptx::global_timer();
  LayerWait wait(begin);
  int slowest = c.p.call.rank();  // rank of the lanes that have waited longest
  const auto charge = [&] {
    if constexpr (kAwaited == Awaited::ranks) {
      CudaLane::Warp w = waiting_lane(c);
      if (lane() == 0) ChargeWait<CudaLane>{}(w, &c.p.call, slowest, ptx::global_timer() - begin);
    }
  };
  for (uint32_t polls = 1;; ++polls) {
    const uint64_t flag = seen();
    const bool waits = !flag_reached(flag, c.word);
    const uint32_t waiting = __ballot_sync(~0u, waits);
    if (waiting == 0) {
      span.end(rank);
      charge();
      return true;
    }
    if constexpr (kAwaited == Awaited::ranks) {
      const uint32_t others = __ballot_sync(~0u, waits && rank != c.p.call.rank());
      if (others != 0) slowest = __shfl_sync(~0u, rank, __ffs(static_cast<int>(others)) - 1);
    }
    if ((polls & 63) != 0) continue;
    const int first = __ffs(static_cast<int>(waiting)) - 1, awaited = __shfl_sync(~0u, rank, first);
    const uint64_t missing = __shfl_sync(~0u, flag, first);
    if (__any_sync(~0u, lane() == 0 && !wait.keep_waiting(c, site, awaited, missing, static_cast<int>(polls >> 6)))) {
      charge();
      return false;
    }
  }
}
/// Waits until `count` flags of this rank, set on this GPU, have reached this call's epoch. A lane's loads are in flight
/// together.
template <class A>
__device__ __forceinline__ bool wait_flags(const LayerCall& c, Site site, Event event, const uint64_t* flags, int count) {
  constexpr int kAtOnce = 6;
  static_assert(kAtOnce * 32 >= Bf16Layer::kRows && kAtOnce * 32 >= kWideSharedRows);
  return wait_until<A, Awaited::this_rank>(c, site, event, c.p.call.rank(), [&] {
    uint64_t missing = c.word;
    for (int first = lane(); first < count; first += kAtOnce * 32) {
      uint64_t seen[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        seen[i] = first + i * 32 < count ? ptx::load_acquire<Scope::device>(flags + first + i * 32) : c.word;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (!flag_reached(seen[i], c.word)) missing = seen[i];
    }
    return missing;
  });
}

/// Sets the flag of a stored tile, from one lane, unless a wait of this block has failed: the tile's rows may then be missing,
/// and with them the announcements that returning warps read. Other blocks' waits for the flag end with the abort.
__device__ __forceinline__ void release_tile(const LayerCall& c, uint64_t* flag) {
  if (ptx::load_shared(c.r.failed()) == 0) ptx::store_release<Scope::device>(flag, c.word);
}

/// True for a pass that is not part of the call. Call after ptx::wait_for_previous().
__device__ __forceinline__ bool is_left_out(const FusedParams& p) {
  return p.pass > 0 && static_cast<uint64_t>(p.pass) > p.state->passes;
}

/// Resets the block's move counters, which count all passes of a call. Call from one thread of a block before other threads
/// move rows.
__device__ __forceinline__ void begin_counting(const FusedParams& p) {
  if (p.pass == 0) p.call.moved[blockIdx.x] = {};
}
/// Adds the bytes and rows moved by a warp. Call from one lane.
__device__ __forceinline__ void count_moved(const FusedParams& p, const MoveCounter& moved) {
  MoveCounter& block = p.call.moved[blockIdx.x];
#define SY_STATISTIC_MOVED(name) \
  if (moved.name != 0) (void)ptx::add_relaxed(&block.name, moved.name);
#define SY_STATISTIC_TIME(name)
#include "switchyard/statistics.def"
}

/// Last step of each warp, called from one lane; the rank's last warp ends the call.
template <class L>
__device__ __forceinline__ void leave(const FusedParams& p, uint64_t epoch) {
  constexpr int kWarps = L::kThreads / 32;
  if (ptx::add_acq_rel<Scope::device>(&p.memory.counters->exits, 1) + 1 != uint64_t{gridDim.x} * kWarps) return;
  *p.memory.counters = FusedCounters{};
  p.state->epoch = epoch;
}

/// Calls `each(tile)` for every tile of the block. Call from all lanes of a warp. Each entry is released before `each` runs.
template <class Each>
__device__ __forceinline__ void for_each_layer_tile(const LayerStorage& r, Each each) {
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1);
    ptx::mbarrier_wait(r.storage.announced(slot), static_cast<uint32_t>(i >> 1 & 1));
    const LayerTile t = read_layer_tile(r.storage.entry(slot));
    ptx::mbarrier_arrive(r.storage.taken(slot));
    if (t.tile.shape == gemm::kNoTile) return;
    each(t);
  }
}

/// Waits until the rows read by a tile are ready. Call from all lanes of the claimer warp. The claimer then notifies the warp
/// that copies these rows with the copy engine; that warp needs a proxy fence.
template <class A, class L>
__device__ __forceinline__ void await_rows(const LayerCall& c, const LayerTile& t) {
  const FusedParams& p = c.p;
  if (t.tile.shape == gemm::kNoTile || !p.parts.up) return;
  if (t.down) {
    const FlagRange tiles = awaited_by_down(t.index, p.up.column_tiles * L::kWriters);
    (void)wait_flags<A>(c, Site::layer_tiles, Event::wait_tiles, p.memory.h_done + tiles.first, tiles.count);
  } else {
    const FlagRange rows = awaited_by_up(t.tile.row, static_cast<int>(t.tile.shape >> 16));
    (void)wait_flags<A>(c, Site::layer_rows, Event::wait_tile_rows, p.memory.arrived + rows.first, rows.count);
  }
  __syncwarp();
}
/// Announces the tile in `slot`, whose rows are ready, to the block's warps. Call from all lanes of the claimer warp.
__device__ __forceinline__ void announce_tile(const LayerStorage& r, uint32_t slot, const LayerTile& t) {
  if (lane() != 0) return;
  write_layer_tile(r.storage.entry(slot), t);
  ptx::mbarrier_arrive(r.storage.announced(slot));
}

/// Takes the next `count` of the indices 0, 1, 2, ...; call from all lanes. \returns the first
__device__ __forceinline__ int64_t take(uint64_t* counter, int count) {
  uint64_t i = 0;
  if (lane() == 0) i = ptx::add_relaxed(counter, static_cast<uint64_t>(count));
  return static_cast<int64_t>(__shfl_sync(~0u, i, 0));
}

}  // namespace switchyard::detail::fused

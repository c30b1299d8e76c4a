// SPDX-License-Identifier: Apache-2.0
// Code shared by the grouped GEMM kernels. A persistent grid, with one block per multiprocessor. One thread claims tiles (with
// an atomic ticket, shortly before the tile is needed), computes their positions and announces them through two slots. One
// thread loads stages. Two warpgroups each multiply 128 of a tile's 256 outputs and store the results. All waits are for
// threads and copies in the same block.
//
// K, a kernel's kind, has the following members: Element, type of outputs; kOrder, order of the weights; kGated, kActivated;
// kStageElements, elements of the inner dimension per stage, 128 bytes of a row; kColumns, output columns per tile;
// kInterleaved, whether gate and up elements are in the same half of a warpgroup's accumulators, 8 rows apart, or in different
// halves.
#pragma once

#include <cstdint>
#include <type_traits>

#include "arch/cuda/float_math.cuh"
#include "arch/cuda/tensor_copy.cuh"
#include "arch/cuda/wgmma.cuh"
#include "gemm/gpu/grouped_params.hpp"
#include "gemm/gpu/kernels.hpp"

namespace switchyard::detail::gemm {

inline constexpr int kMathThreads = 256, kMathWarps = 8, kLoaderThread = kMathThreads, kClaimerThread = kMathThreads + 32;
inline constexpr int kBlocksAhead = 8;          // the next tile is claimed this many inner blocks before the end of a tile
inline constexpr uint32_t kMaxTileStages = 15;  // all ones: used as a mask
inline constexpr uint32_t kRowBytes = kInner * 2;
inline constexpr uint32_t kQuarterBytes = 64 * kRowBytes;           // weights of 64 outputs
inline constexpr uint32_t kWeightBytes = kTileColumns * kRowBytes;  // of a stage
inline constexpr uint32_t kFixedBytes = 1024;                       // barriers and slots
inline constexpr uint32_t kNoTile = 0;

/// A tile, as stored in its block: 16 bytes of shared memory.
struct Tile {
  int expert, column_tile, row;
  uint32_t shape;  // width | rows << 16; kNoTile: no tile
};

/// Layout of shared memory: barriers and slots, staging for both warpgroups, stages, and finally the list of first tickets. The
/// row counts determine the size of a stage and thus the number of stages; all other sizes are fixed, to save registers.
struct SharedStorage {
  uint32_t base;
  uint32_t sizes;  ///< staging_bytes() + num_stages(): one register

  /// Staging for one warpgroup: the widest tile's rows, 128 bytes each.
  __device__ uint32_t staging_bytes() const { return sizes & ~uint32_t{kMaxTileStages}; }
  __device__ uint32_t num_stages() const { return sizes & uint32_t{kMaxTileStages}; }

  __device__ uint32_t full(uint32_t stage) const { return base + 8 * stage; }
  __device__ uint32_t empty(uint32_t stage) const { return base + 128 + 8 * stage; }
  __device__ uint32_t announced(uint32_t slot) const { return base + 256 + 8 * slot; }
  __device__ uint32_t taken(uint32_t slot) const { return base + 272 + 8 * slot; }
  __device__ uint32_t due() const { return base + 288; }
  __device__ uint32_t entry(uint32_t slot) const { return base + 304 + 16 * slot; }
  /// Clusters of two blocks: barriers and slots of the tickets that the first block sends to the second.
  __device__ uint32_t sent(uint32_t slot) const { return base + 336 + 8 * slot; }
  __device__ uint32_t letter(uint32_t slot) const { return base + 352 + 4 * slot; }
  /// fp8 with scales per channel: barriers of the scales of the tile in slot `slot`.
  __device__ uint32_t scaled(uint32_t slot) const { return base + 368 + 8 * slot; }
  __device__ uint32_t staging(int group) const { return base + kFixedBytes + static_cast<uint32_t>(group) * staging_bytes(); }
  __device__ uint32_t stage(uint32_t slot) const {
    return base + kFixedBytes + 2 * staging_bytes() + slot * (kWeightBytes + staging_bytes());
  }
};

__device__ __forceinline__ SharedStorage make_storage(uint32_t base, uint32_t shared_bytes, int num_experts, int widest) {
  const uint32_t list = (static_cast<uint32_t>(num_experts) + 2) * 4, staging = static_cast<uint32_t>(widest) * kRowBytes;
  const uint32_t fit = (shared_bytes - kFixedBytes - list - 2 * staging) / (kWeightBytes + staging);
  return {base, staging + (fit < kMaxTileStages ? fit : kMaxTileStages)};
}

/// Call from one thread, then `__syncthreads()`. `loaders` is the number of arrivals that fill a stage, including that of the
/// copies. `readers` is the number of threads that read an entry. `users` is the number of arrivals that release a stage.
__device__ __forceinline__ void make_barriers(const SharedStorage& storage, uint32_t loaders, uint32_t readers,
                                              uint32_t users = kMathWarps) {
  if (threadIdx.x != 0) return;
  for (uint32_t i = 0; i < storage.num_stages(); ++i) {
    ptx::mbarrier_init(storage.full(i), loaders);
    ptx::mbarrier_init(storage.empty(i), users);
  }
  for (uint32_t i = 0; i < 2; ++i) {
    ptx::mbarrier_init(storage.announced(i), 1);
    ptx::mbarrier_init(storage.taken(i), readers);
  }
  ptx::mbarrier_init(storage.due(), 1);
  ptx::fence_mbarrier_init();
}

__device__ __forceinline__ int64_t first_row_of(const RowRanges& r, int expert) {
  return r.first_row != nullptr ? r.first_row[expert] : expert * r.rows_per_expert;
}
/// Number of rows of an expert: 0 if its first row is negative; rows past the end are not counted.
__device__ __forceinline__ int64_t rows_of(const RowRanges& r, int expert) {
  const int64_t given =
      r.wide ? static_cast<const int64_t*>(r.num_rows)[expert] : static_cast<const int32_t*>(r.num_rows)[expert];
  const int64_t first = first_row_of(r, expert);
  if (first < 0) return 0;
  const int64_t left = r.end - first;
  const int64_t max = r.first_row == nullptr && r.rows_per_expert < left ? r.rows_per_expert : left;
  return given < 0 || max < 0 ? 0 : given < max ? given : max;
}

/// Like rows_of(), but returns 0 if the number is outside this launch's range [min, max].
__device__ __forceinline__ int64_t rows_of(const GroupedParams& p, int expert) {
  const int64_t rows = rows_of(p.ranges, expert);
  return rows < p.min || rows > p.max ? 0 : rows;
}

/// Replaces values[0], ..., values[count - 1] by their exclusive prefix sums, and values[count] by the total. Call from all
/// threads after `__syncthreads()`; another `__syncthreads()` is required before the values are read.
__device__ __forceinline__ void sum_before(int* values, int count) {
  if (threadIdx.x < 32) {
    int sum = 0;
    for (int e = static_cast<int>(threadIdx.x); e - static_cast<int>(threadIdx.x) < count + 1; e += 32) {
      const int own = e < count ? values[e] : 0;
      int before = own;
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, before, step);
        if (static_cast<int>(threadIdx.x) >= step) before += other;
      }
      if (e <= count) values[e] = sum + before - own;
      sum += __shfl_sync(~0u, before, 31);
    }
  }
}

/// Sets first_tickets[e] to the number of tickets of all experts before e, and the last entry to the total number of tickets.
/// `tickets(rows)` is the number of an expert. Returns the width of the widest tile, at least kRowStep. Call from all threads;
/// ends with `__syncthreads()`.
template <class Tickets>
__device__ __forceinline__ int count_tickets(const GroupedParams& p, int* first_tickets, int* widest, Tickets tickets) {
  int mine = kRowStep;
  if (threadIdx.x == 0) *widest = 0;
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < p.num_experts; e += static_cast<int>(blockDim.x)) {
    const int64_t rows = rows_of(p, e);
    const int width = widest_row_tile(rows, p.max_rows);
    first_tickets[e] = tickets(rows);
    mine = width > mine ? width : mine;
  }
  atomicMax(widest, mine);
  __syncthreads();
  sum_before(first_tickets, p.num_experts);
  __syncthreads();
  return *widest;
}

__device__ __forceinline__ int count_tickets(const GroupedParams& p, int* first_tickets, int* widest) {
  return count_tickets(p, first_tickets, widest,
                       [&](int64_t rows) { return count_row_tiles(rows, p.max_rows) * p.column_tiles; });
}

/// Returns the expert of a ticket, or -1 if there is no such ticket.
__device__ __forceinline__ int expert_of_ticket(const GroupedParams& p, const int* first_tickets, uint32_t ticket) {
  if (ticket >= static_cast<uint32_t>(first_tickets[p.num_experts])) return -1;
  int low = 0, high = p.num_experts;  // first_tickets[low] <= ticket < first_tickets[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (static_cast<uint32_t>(first_tickets[middle]) <= ticket)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/// Returns the tile for a ticket.
__device__ __forceinline__ Tile tile_of(const GroupedParams& p, const int* first_tickets, uint32_t ticket) {
  const int expert = expert_of_ticket(p, first_tickets, ticket);
  if (expert < 0) return {0, 0, 0, kNoTile};
  const int64_t rows = rows_of(p, expert);
  const TilePlace place =
      tile_place(static_cast<int64_t>(ticket) - first_tickets[expert], count_row_tiles(rows, p.max_rows), p.column_tiles);
  const RowTile t = row_tile(rows, place.row_tile, p.max_rows);
  return {expert, place.column_tile, static_cast<int>(first_row_of(p.ranges, expert) + t.first),
          static_cast<uint32_t>(t.width) | static_cast<uint32_t>(t.rows) << 16};
}

__device__ __forceinline__ Tile read_entry(uint32_t entry) {
  const int4 e = ptx::load_shared_16(entry);
  return {e.x, e.y, e.z, static_cast<uint32_t>(e.w)};
}

/// Role of the claimer thread. Each tile is claimed when the loader nears the end of the previous one. If it were claimed
/// later, the other roles would wait for it; if earlier, a block could end up holding a tile that another block could already
/// start.
__device__ __forceinline__ void claim_tiles(const GroupedParams& p, const SharedStorage& storage, const int* first_tickets) {
  uint32_t ticket = blockIdx.x;
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1);
    if (i > 0) {
      ptx::mbarrier_wait(storage.due(), static_cast<uint32_t>(i - 1) & 1);
      ticket = gridDim.x + atomicAdd(p.tickets, 1u);
    }
    const Tile t = tile_of(p, first_tickets, ticket);
    ptx::mbarrier_wait(storage.taken(slot), static_cast<uint32_t>(i >> 1 & 1) ^ 1);
    ptx::store_shared_16(storage.entry(slot), {t.expert, t.column_tile, t.row, static_cast<int>(t.shape)});
    ptx::mbarrier_arrive(storage.announced(slot));
    if (t.shape == kNoTile) break;
  }
  // The last block resets the counters. All claims have then been made, because each block counts itself only after its own
  // claims.
  if (atomicAdd(p.tickets + 1, 1u) == gridDim.x - 1) p.tickets[0] = p.tickets[1] = 0;
}

/// Loads one stage. `output` is the first of a tile's weights, counted in outputs; for gated kernels, it refers to the gate
/// half.
/// - Order inner: one box of 256 weights. Gated: 8 of the gate half, 8 of the up half, 8 of the gate half, ..., so that both
///   elements of an output are in one thread's accumulators of the same half.
/// - Order outer: four boxes of 64 weights. Gated: gate, up, gate, up, so that the two elements are in the accumulators of
///   different halves.
template <class K>
__device__ __forceinline__ void load_stage(const GroupedParams& p, const Tile& t, uint32_t stage, uint32_t bar, int block) {
  const int width = static_cast<int>(t.shape & 0xffff), inner = block * K::kStageElements, output = t.column_tile * K::kColumns;
  ptx::mbarrier_expect(bar, kWeightBytes + static_cast<uint32_t>(width) * kRowBytes);
  if constexpr (K::kOrder == ptx::OperandOrder::outer) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int first = K::kGated ? output + quarter / 2 * 64 + quarter % 2 * p.gate_rows : output + quarter * 64;
      ptx::load_box(stage + static_cast<uint32_t>(quarter) * kQuarterBytes, &p.weights, bar, first, inner, t.expert);
    }
  } else if constexpr (K::kGated) {
    ptx::load_box(stage, &p.weights, bar, inner, 0, 0, output / 8, t.expert);
  } else {
    ptx::load_box(stage, &p.weights, bar, inner, output, t.expert);
  }
  ptx::load_box(stage + kWeightBytes, &p.rows[width / kRowStep - 1], bar, inner, t.row);
}

/// Calls `each(tile)` for every tile announced to the block. The calling thread first releases the tile's entry.
template <class AnyStorage, class Each>
__device__ __forceinline__ void for_each_tile(const AnyStorage& storage, Each each) {
  for (int i = 0;; ++i) {
    const uint32_t entry = static_cast<uint32_t>(i & 1);
    ptx::mbarrier_wait(storage.announced(entry), static_cast<uint32_t>(i >> 1 & 1));
    const Tile t = read_entry(storage.entry(entry));
    if (t.shape == kNoTile) break;
    ptx::mbarrier_arrive(storage.taken(entry));
    each(t);
  }
}

/// Role of the loader thread.
template <class K>
__device__ __forceinline__ void load_tiles(const GroupedParams& p, const SharedStorage& storage) {
  const int due_at = p.inner_blocks > kBlocksAhead ? p.inner_blocks - kBlocksAhead : 0;
  uint32_t slot = 0, parity = 1;
  for_each_tile(storage, [&](const Tile& t) {
    for (int block = 0; block < p.inner_blocks; ++block) {
      if (block == due_at) ptx::mbarrier_arrive(storage.due());
      ptx::mbarrier_wait(storage.empty(slot), parity);
      load_stage<K>(p, t, storage.stage(slot), storage.full(slot), block);
      if (++slot == storage.num_stages()) slot = 0, parity ^= 1;
    }
  });
}

/// A math warp's position in the ring of stages.
struct Position {
  uint32_t slot = 0, parity = 0;
};

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x & 31); }
__device__ __forceinline__ int warp_of_group() { return static_cast<int>(threadIdx.x >> 5 & 3); }
__device__ __forceinline__ int math_group() { return static_cast<int>(threadIdx.x >> 7); }

template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
}
/// Computes v / (1 + exp(-alpha * v)) to about 2 units in the last place; branch-free, for any v.
__device__ __forceinline__ float silu(float v, float alpha) {
  constexpr float kLog2e = 1.4426950408889634F;
  return v * ptx::reciprocal(1.f + ptx::exp2(-kLog2e * alpha * v));
}
__device__ __forceinline__ float gated(const Gating& g, float gate, float up) {
  return silu(ptx::min_or_nan(gate, g.limit), g.alpha) * (ptx::max_or_nan(ptx::min_or_nan(up, g.limit), -g.limit) + g.shift);
}
template <class K>
__device__ __forceinline__ float activated(const GroupedParams& p, float v) {
  if constexpr (!K::kActivated) return v;
  // Computes both and selects one: a branch per element would triple compile time.
  const float smooth = silu(v, 1.f), cut = ptx::max_or_nan(v, 0.f);
  return p.activation == Activation::silu ? smooth : cut;
}

/// Offset of piece `piece` (16 bytes) of a row in staging, with `kPieces` pieces per row; swizzled for a tensor copy.
template <int kPieces>
__device__ __forceinline__ uint32_t staged_at(int row, int piece) {
  return static_cast<uint32_t>(row * kPieces + (kPieces == 8 ? piece ^ (row & 7) : piece ^ (row >> 1 & 3))) * 16;
}
/// Writes `kColumns` (64 or 32) outputs for each of `kWidth` rows of this warpgroup to staging, as rows of 128 or 64 bytes.
/// `value(i)` is output i of this thread, which has 8 (64 columns) or 4 outputs per 16 rows.
template <class K, int kWidth, int kColumns, class Value>
__device__ __forceinline__ void stage_outputs(uint32_t staging, Value value) {
  constexpr int kPieces = kColumns / 8;
  const auto two = [&](int i) { return pack<typename K::Element>(value(i), value(i + 1)); };
#pragma unroll
  for (int row = 0; row < kWidth; row += 16) {
    if constexpr (kPieces == 8) {
      const int at = row + (lane() & 7) + (lane() >> 4) * 8, piece = warp_of_group() * 2 + (lane() >> 3 & 1), i = row / 2;
      ptx::store_transposed(staging + staged_at<kPieces>(at, piece), two(i), two(i + 2), two(i + 4), two(i + 6));
    } else {
      ptx::store_transposed(staging + staged_at<kPieces>(row + (lane() & 15), warp_of_group()), two(row / 4), two(row / 4 + 2));
    }
  }
}

/// Stores outputs, passed as for stage_outputs(), to columns [column, column + kColumns) of the tile's rows. Staging is free
/// again after the wait in the next call.
template <class K, int kWidth, int kColumns, class Value>
__device__ __forceinline__ void store_outputs(const GroupedParams& p, uint32_t staging, int column, const Tile& t,
                                              Value value) {
  constexpr int kPieces = kColumns / 8;  // 16 bytes each
  if (lane() == 0) ptx::bulk_wait_read();
  ptx::named_barrier(1 + math_group(), 128);
  stage_outputs<K, kWidth, kColumns>(staging, value);
  ptx::fence_proxy_async_shared();
  ptx::named_barrier(1 + math_group(), 128);
  const int rows = static_cast<int>(t.shape >> 16), wide = rows / 64, boxes = wide + rows % 64 / 16;
  if (lane() == 0) {
    for (int b = warp_of_group(); b < boxes; b += 4) {
      const int first = b < wide ? b * 64 : wide * 48 + b * 16;
      ptx::store_box(b < wide ? &p.out_64 : &p.out_16, staging + static_cast<uint32_t>(first * kPieces) * 16, column,
                     t.row + first);
    }
    ptx::bulk_commit();
  }
  const int in_boxes = rows & ~15;  // the last rows of an expert; the rows after them belong to the next expert
#pragma unroll 1
  for (int i = in_boxes * kPieces + warp_of_group() * 32 + lane(); i < rows * kPieces; i += 128) {
    const int row = i / kPieces, piece = i % kPieces;
    if (column + piece * 8 >= p.columns) continue;
    *reinterpret_cast<int4*>(p.out + static_cast<int64_t>(t.row + row) * p.columns + column + piece * 8) =
        ptx::load_shared_16(staging + staged_at<kPieces>(row, piece));
  }
}

/// Output i of this thread, computed from gate and up elements in the same half of its accumulators.
template <int kWidth>
__device__ __forceinline__ float interleaved_output(const GroupedParams& p, const float (&d)[kWidth / 2], int i) {
  return gated(p.gating, d[i / 2 * 4 + i % 2], d[i / 2 * 4 + i % 2 + 2]);
}

/// Stores half `half` of this warpgroup's accumulators.
template <class K, int kWidth>
__device__ __forceinline__ void store_half(const GroupedParams& p, const SharedStorage& storage, const Tile& t, int half,
                                           const float (&d)[kWidth / 2]) {
  constexpr int kColumns = K::kColumns / 4;
  const int column = t.column_tile * K::kColumns + (math_group() * 2 + half) * kColumns;
  store_outputs<K, kWidth, kColumns>(p, storage.staging(math_group()), column, t, [&](int i) {
    if constexpr (K::kInterleaved)
      return interleaved_output<kWidth>(p, d, i);
    else
      return activated<K>(p, d[i]);
  });
}

/// Descriptors of a loaded stage: this warpgroup's weights and the rows.
struct Operands {
  uint64_t weights, rows;
};
__device__ __forceinline__ Operands next_stage(const SharedStorage& storage, const Position& at) {
  ptx::mbarrier_wait(storage.full(at.slot), at.parity);
  const uint32_t stage = storage.stage(at.slot);
  ptx::wgmma_begin();
  return {ptx::operand_at(stage + static_cast<uint32_t>(math_group()) * (kWeightBytes / 2)),
          ptx::operand_at(stage + kWeightBytes)};
}
__device__ __forceinline__ void release_stage(const SharedStorage& storage, uint32_t slot) {
  if (lane() == 0) ptx::mbarrier_arrive(storage.empty(slot));
}
template <class AnyStorage>
__device__ __forceinline__ void advance(const AnyStorage& storage, Position& at) {
  if (++at.slot == storage.num_stages()) at.slot = 0, at.parity ^= 1;
}

/// Role of each of the eight math warps: calls `multiply.operator()<width>(position, entry)` for every tile of its block, with
/// widths up to kMax.
template <int kMax, class Multiply>
__device__ __forceinline__ void multiply_tiles(const SharedStorage& storage, Multiply multiply) {
  Position at;
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1), entry = storage.entry(slot);
    ptx::mbarrier_wait(storage.announced(slot), static_cast<uint32_t>(i >> 1 & 1));
    const uint32_t shape = static_cast<uint32_t>(ptx::load_shared_16(entry).w);
    if (shape == kNoTile) break;
    const auto with = [&]<int kWidth>() {
      if constexpr (kWidth <= kMax) multiply.template operator()<kWidth>(at, entry);
    };
    switch (shape & 0xffff) {
      case 16: with.template operator()<16>(); break;
      case 32: with.template operator()<32>(); break;
      case 48: with.template operator()<48>(); break;
      case 64: with.template operator()<64>(); break;
      case 80: with.template operator()<80>(); break;
      case 96: with.template operator()<96>(); break;
      case 112: with.template operator()<112>(); break;
      case 128: with.template operator()<128>(); break;
      case 144: with.template operator()<144>(); break;
      case 160: with.template operator()<160>(); break;
      case 176: with.template operator()<176>(); break;
      case 192: with.template operator()<192>(); break;
    }
    ptx::mbarrier_arrive(storage.taken(slot));
  }
  if (lane() == 0) ptx::bulk_wait();
}

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
// Returns in order per_rank: the sum of a token's weighted outputs on this rank is stored in its owner's inbox (which may be on
// this rank) once the token's highest row is complete. Its other rows are in the same row tile or in earlier ones. Sums are
// computed by the warp that has pulled rows, which loads outputs in pieces into shared memory, while products run; and by the
// multiplying warps once no tiles are left for them.
#pragma once

#include "exchange/fused/layer_returns.cuh"
#include "exchange/fused/layer_sums.cuh"

namespace switchyard::detail::fused {

/// The sum returned by a lane's row, which is the highest of its token's rows on this rank. May be read once the row's outputs
/// are ready.
struct ReturnedSum {
  int64_t lowest = -1;  ///< row that has the places of all rows of the sum; -1: the lane returns none
  int64_t index = 0;    ///< in the owner's inbox
  int owner = 0;

  __device__ __forceinline__ ReturnedSum(const LayerCall& c, const ReturnedRows& r) {
    const FusedParams& p = c.p;
    if (lane() >= r.rows) return;
    const int64_t source = *p.call.heap.local(p.layout.source(r.first + lane()));
    lowest = summed_places(p.call.heap, p.layout, r.first + lane());
    index = returned_row(p.layout, source);
    owner = source_rank(source);
  }
};

/// The rows of one sum, k ascending: those of lanes 0 to n - 1.
struct SummedRows {
  uint32_t lanes = 0;  ///< the lowest n bits
  const std::byte* at = nullptr;
  float weight = 0.F;

  __device__ __forceinline__ SummedRows(const FusedParams& p, int64_t lowest) {
    int32_t place = -1;
    if (lane() < p.layout.topk) {
      place = p.call.heap.local(p.layout.places(lowest))[lane()];
      weight = p.call.heap.local(p.layout.place_weights(lowest))[lane()];
    }
    lanes = __ballot_sync(~0u, place >= 0);
    if (place >= 0) at = p.memory.y + place * p.layout.row_bytes;
  }
};

/// Waits until all outputs of the row tiles before `end` are stored. `complete`: number of leading row tiles whose flags this
/// warp has acquired, directly or through `counters->complete`. There, warps publish their numbers so that warps that begin
/// late need not read all flags; every published number is valid, because its writer has acquired the flags. Call from all
/// lanes. Returns false after a fault.
template <class A, class L>
__device__ __forceinline__ bool await_row_tiles(const LayerCall& c, int end, int& complete) {
  const FusedParams& p = c.p;
  if (complete >= end) return true;
  uint64_t known = 0;
  if (lane() == 0) known = ptx::load_acquire<Scope::device>(&p.memory.counters->complete);
  known = __shfl_sync(~0u, known, 0);
  __syncwarp();
  if (static_cast<int>(known) > complete) complete = static_cast<int>(known);
  if (complete >= end) return true;
  const FlagRange tiles = awaited_by_return(complete, end, p.down.column_tiles * L::kWriters);
  if (!wait_flags<A>(c, Site::layer_tiles, Event::wait_tiles, p.memory.y_done + tiles.first, tiles.count)) return false;
  __syncwarp();
  complete = end;
  if (lane() == 0) ptx::store_release<Scope::device>(&p.memory.counters->complete, static_cast<uint64_t>(end));
  return true;
}

/// Returns sums, row tile by row tile, until none are left to claim. Calls sum(rows, destination) for each, which uses ordinary
/// stores, then sets the flags at the owners, which may be this rank. Call from all lanes of a warp. \returns the bytes that
/// left this rank
template <class A, class L, class Sum>
__device__ __forceinline__ uint64_t return_sums(const LayerCall& c, const int* first_tiles, Sum sum) {
  const FusedParams& p = c.p;
  const HeapView& heap = p.call.heap;
  const int64_t tasks = int64_t{first_tiles[p.up.num_experts]} * ReturnedRows::returns_of_tile<L>(p);
  uint64_t left_rank = 0;
  int complete = 0;
  for (;;) {
    const int64_t task = take(&p.memory.counters->returns, 1);
    if (task >= tasks) return left_rank;
    const ReturnedRows r = ReturnedRows::of<L>(p, first_tiles, task);
    if (r.rows <= 0) continue;
    if (!await_row_tiles<A, L>(c, r.tile + 1, complete)) return left_rank;
    const RoleSpan<A> span(Event::return_rows);
    const ReturnedSum mine(c, r);
    ptx::fence_proxy_async_global();  // before bulk copies of the outputs
    const bool returns = mine.lowest >= 0;
    const uint32_t all = __ballot_sync(~0u, returns);
    const auto bytes =
        static_cast<uint64_t>(__popc(__ballot_sync(~0u, returns && mine.owner != p.call.rank())) * p.layout.row_bytes);
    std::byte* const to = returns ? heap.at(mine.owner, p.layout.inbox(mine.index)) : nullptr;
    for (uint32_t left = all; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const SummedRows rows(p, __shfl_sync(~0u, mine.lowest, i));
      sum(rows, reinterpret_cast<std::byte*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(to), i)));
    }
    left_rank += bytes;
    __syncwarp();
    if (returns) ptx::store_release<Scope::system>(heap.at(mine.owner, p.layout.returned(mine.index)), c.word);
    __syncwarp();
    span.end(__popc(all), record_bytes(bytes));
  }
}

/// Adds the vector at `from` of each of `n` rows, `pitch` bytes apart in shared memory; lane i has the weight of row i. Call
/// from all lanes.
__device__ __forceinline__ void add_staged_rows(uint32_t from, uint32_t n, uint32_t pitch, float weight, float (&sum)[8]) {
  constexpr uint32_t kAtOnce = 4;
  for (uint32_t first = 0; first < n; first += kAtOnce) {
    int4 x[kAtOnce];
    float w[kAtOnce];
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      const uint32_t row = first + j < n ? first + j : n - 1;
      x[j] = ptx::load_shared_16(from + row * pitch);
      w[j] = __shfl_sync(~0u, weight, static_cast<int>(row));
    }
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j)
      if (first + j < n)
        add_weighted({static_cast<uint32_t>(x[j].x), static_cast<uint32_t>(x[j].y), static_cast<uint32_t>(x[j].z),
                      static_cast<uint32_t>(x[j].w)},
                     w[j], true, sum);
  }
}

/// For the warp that has pulled rows: while the rows of one half of the piece storage are added, the other half is loaded.
template <class A, class L>
__device__ __forceinline__ void return_sums_by_copies(const LayerCall& c, const int* first_tiles, Pieces& pieces,
                                                      MoveCounter& moved) {
  const auto row_bytes = static_cast<uint32_t>(c.p.layout.row_bytes);
  pieces.begin_round();
  moved.remote_bytes += return_sums<A, L>(c, first_tiles, [&](const SummedRows& rows, std::byte* to) {
    const auto n = static_cast<uint32_t>(__popc(rows.lanes));
    const uint32_t each = c.p.summed_bytes[n];
    const auto bytes_at = [&](uint32_t begin) { return row_bytes - begin < each ? row_bytes - begin : each; };
    pieces.load_rows(0, n, rows.at, each, bytes_at(0));
    int half = 0;
    for (uint32_t begin = 0; begin < row_bytes; begin += each, half ^= 1) {
      if (const uint32_t next = begin + each; next < row_bytes)
        pieces.load_rows(half ^ 1, n, rows.at + next, each, bytes_at(next));
      pieces.wait_half(half);
      const uint32_t vectors = bytes_at(begin) / 16;
      for (uint32_t first = 0; first < vectors; first += 32) {
        const uint32_t v = first + static_cast<uint32_t>(lane());
        float sum[8] = {};
        add_staged_rows(pieces.half(half) + (v < vectors ? v : 0) * 16, n, each, rows.weight, sum);
        if (v < vectors) reinterpret_cast<uint4*>(to + begin)[v] = rounded(sum);
      }
      ptx::fence_proxy_async_shared();  // the lanes have read this half by ordinary loads; the next copies overwrite it
      __syncwarp();
    }
  });
}

/// For a warp that has no tiles left.
template <class A, class L>
__device__ __forceinline__ void return_sums_by_threads(const LayerCall& c, const int* first_tiles) {
  const FusedParams& p = c.p;
  const auto vectors = static_cast<int>(p.layout.row_bytes / 16);
  constexpr int kVectors = 4, kAtOnce = 4;
  MoveCounter moved;
  moved.remote_bytes = return_sums<A, L>(c, first_tiles, [&](const SummedRows& rows, std::byte* to) {
    for (int v = lane(); v - lane() < vectors; v += 32 * kVectors) {
      float sum[kVectors][8] = {};
      add_rows<kVectors, kAtOnce>(rows.lanes, rows.at, rows.weight, true, v, vectors, sum);
#pragma unroll
      for (int u = 0; u < kVectors; ++u)
        if (v + 32 * u < vectors) reinterpret_cast<uint4*>(to)[v + 32 * u] = rounded(sum[u]);
    }
  });
  if (lane() == 0) count_moved(p, moved);
}

/// Returns by the warp that has pulled rows.
template <class A, class L, bool kPerRank>
__device__ __forceinline__ void return_by_copies(const LayerCall& c, const int* first_tiles, Pieces& pieces,
                                                 MoveCounter& moved) {
  if constexpr (kPerRank)
    return_sums_by_copies<A, L>(c, first_tiles, pieces, moved);
  else
    return_rows_by_copies<A, L>(c, first_tiles, pieces, moved);
}
/// The last steps of a multiplying warp. per_route: more rows are added per token, so more of them are in flight at once.
template <class A, class L, bool kPerRank>
__device__ __forceinline__ void return_and_sum_by_threads(const LayerCall& c, const int* first_tiles) {
  if constexpr (kPerRank) {
    return_sums_by_threads<A, L>(c, first_tiles);
    sum_tokens<A, true, 4, 4>(c);
  } else {
    return_rows_by_threads<A, L>(c, first_tiles);
    sum_tokens<A, false, 2, 8>(c);
  }
}

}  // namespace switchyard::detail::fused

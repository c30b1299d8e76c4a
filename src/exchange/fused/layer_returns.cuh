// SPDX-License-Identifier: Apache-2.0
// Returns in order per_route: outputs return to their owners, by the warp that has pulled rows, in pieces through shared
// memory, while products run; and by the multiplying warps once no tiles are left for them.
#pragma once

#include "exchange/fused/layer_moves.cuh"

namespace switchyard::detail::fused {

/// Rows that are returned together: some rows of a row tile; empty past its end.
struct ReturnedRows {
  int tile = 0, rows = 0;
  int64_t first = 0;

  /// Rows of the rank's task `task`. `first_tiles`: from count_row_tiles_of().
  template <class L>
  static __device__ __forceinline__ ReturnedRows of(const FusedParams& p, const int* first_tiles, int64_t task) {
    const int of_tile = returns_of_tile<L>(p), tile = static_cast<int>(task / of_tile);
    const int before = static_cast<int>(task % of_tile) * p.returned.at_once;
    const int expert = expert_of_tile(first_tiles, p.up.num_experts, tile);
    const RowTile t = L::tile(gemm::rows_of(p.up.ranges, expert), tile - first_tiles[expert]);
    const int left = t.rows - before;
    return {tile, left < p.returned.at_once ? left : p.returned.at_once,
            gemm::first_row_of(p.up.ranges, expert) + t.first + before};
  }
  template <class L>
  static __device__ __forceinline__ int returns_of_tile(const FusedParams& p) {
    return (L::kRows + p.returned.at_once - 1) / p.returned.at_once;
  }
};

/// Owner and destination of a lane's row; the destination is null if the row stays on this rank. May be read once the row's
/// outputs are ready, because its source has announced it by then.
struct ReturnedRow {
  int owner = 0;
  int64_t route = 0;
  std::byte* place = nullptr;

  __device__ __forceinline__ ReturnedRow(const LayerCall& c, const ReturnedRows& r) {
    const FusedParams& p = c.p;
    if (lane() >= r.rows) return;
    const int64_t source = *p.call.heap.local(p.layout.source(r.first + lane()));
    owner = source_rank(source);
    route = returned_row(p.layout, source);
    if (owner != p.call.rank()) place = p.call.heap.at(owner, p.layout.inbox(route));
  }
};

/// Returns outputs to their owners, tile by tile, until none are left to claim. Calls travel(first row, this lane's row) to
/// copy outputs owned by other ranks, then sets the flags at all owners, including this rank. Call from all lanes of a warp.
/// \returns the bytes that left this rank
template <class A, class L, class Travel>
__device__ __forceinline__ uint64_t return_rows(const LayerCall& c, const int* first_tiles, Travel travel) {
  const FusedParams& p = c.p;
  const int64_t tasks = int64_t{first_tiles[p.up.num_experts]} * ReturnedRows::returns_of_tile<L>(p);
  uint64_t left_rank = 0;
  for (;;) {
    const int64_t task = take(&p.memory.counters->returns, 1);
    if (task >= tasks) return left_rank;
    const ReturnedRows r = ReturnedRows::of<L>(p, first_tiles, task);
    if (r.rows <= 0) continue;
    const FlagRange tiles = awaited_by_return(r.tile, r.tile + 1, p.down.column_tiles * L::kWriters);
    if (!wait_flags<A>(c, Site::layer_tiles, Event::wait_tiles, p.memory.y_done + tiles.first, tiles.count)) return left_rank;
    __syncwarp();
    const RoleSpan<A> span(Event::return_rows);
    const ReturnedRow mine(c, r);
    ptx::fence_proxy_async_global();  // for copies by the copy engine
    const auto bytes = static_cast<uint64_t>(__popc(__ballot_sync(~0u, mine.place != nullptr)) * p.layout.row_bytes);
    left_rank += bytes;
    travel(r.first, mine);
    __syncwarp();
    if (lane() < r.rows) ptx::store_release<Scope::system>(p.call.heap.at(mine.owner, p.layout.returned(mine.route)), c.word);
    __syncwarp();
    span.end(r.rows, record_bytes(bytes));
  }
}

/// For the warp that has pulled rows: each lane copies one row.
template <class A, class L>
__device__ __forceinline__ void return_rows_by_copies(const LayerCall& c, const int* first_tiles, Pieces& pieces,
                                                      MoveCounter& moved) {
  const FusedParams& p = c.p;
  const CopyPlan& plan = p.returned;
  const int64_t row_bytes = p.layout.row_bytes;
  pieces.use(plan);
  moved.remote_bytes += return_rows<A, L>(c, first_tiles, [&](int64_t first, const ReturnedRow& mine) {
    const uint32_t travelling = __ballot_sync(~0u, mine.place != nullptr);
    const int rows = __popc(travelling), of_round = plan.whole ? plan.slots : 1;
    const int turn = __popc(travelling & ((1U << lane()) - 1));  // turn of this lane's row, if it is copied
    const std::byte* const from = p.memory.y + (first + lane()) * row_bytes;
    for (int done = 0; done < rows; done += of_round)
      for (int64_t begin = 0; begin < row_bytes; begin += plan.round_bytes()) {
        const int slots = slots_of_round(plan, row_bytes, rows - done < of_round ? rows - done : of_round, begin);
        const bool in_round = mine.place != nullptr && turn >= done && turn < done + of_round;
        const int slot = plan.whole ? turn - done : 0;
        pieces.begin_round();
        for (int i = 0; i < (plan.whole ? 1 : slots); ++i) {
          const RowPiece piece(begin + i * int64_t{plan.piece}, row_bytes, plan.piece);
          if (in_round) pieces.load(slot + i, from + piece.at, piece.bytes);
        }
        pieces.wait(slots);
        for (int i = 0; i < (plan.whole ? 1 : slots); ++i) {
          const RowPiece piece(begin + i * int64_t{plan.piece}, row_bytes, plan.piece);
          if (in_round) ptx::bulk_store(mine.place + piece.at, pieces.at(slot + i), piece.bytes);
        }
        ptx::bulk_commit();
      }
    ptx::bulk_wait();
  });
}

/// For a warp that has no tiles left.
template <class A, class L>
__device__ __forceinline__ void return_rows_by_threads(const LayerCall& c, const int* first_tiles) {
  const FusedParams& p = c.p;
  const auto vectors = static_cast<int>(p.layout.row_bytes / 16);
  constexpr int kAtOnce = 7;
  MoveCounter moved;
  moved.remote_bytes = return_rows<A, L>(c, first_tiles, [&](int64_t first, const ReturnedRow& mine) {
    for (uint32_t left = __ballot_sync(~0u, mine.place != nullptr); left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const auto* const from = reinterpret_cast<const uint4*>(p.memory.y + (first + i) * p.layout.row_bytes);
      auto* const to = reinterpret_cast<uint4*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(mine.place), i));
      for (int v = lane(); v < vectors; v += 32 * kAtOnce) {
        uint4 x[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (v + 32 * j < vectors) x[j] = __ldcg(from + v + 32 * j);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (v + 32 * j < vectors) to[v + 32 * j] = x[j];
      }
    }
  });
  if (lane() == 0) count_moved(p, moved);
}

}  // namespace switchyard::detail::fused

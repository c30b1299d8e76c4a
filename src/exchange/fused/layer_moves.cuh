// SPDX-License-Identifier: Apache-2.0
// Rows that travel: a block's warp that pulls rows of its experts from their sources and then returns outputs to their owners,
// in pieces through shared memory, by the copy engine.
#pragma once

#include "exchange/fused/layer_room.cuh"
#include "protocol/fused_routes.hpp"

namespace switchyard::detail::fused {

/// Pieces on their way through shared memory, two at a time. All lanes call; lane 0 issues.
class Pieces {
 public:
  __device__ explicit Pieces(const LayerRoom& r) : r_(r) {}

  /// Starts to load a piece. The stores of the piece before the last one must have been issued.
  __device__ __forceinline__ void load(const std::byte* from, uint32_t bytes) {
    const uint32_t slot = loads_++ & 1;
    if (lane() != 0) return;
    ptx::bulk_wait_read();
    ptx::mbarrier_expect(r_.come(slot), bytes);
    ptx::bulk_load(r_.piece(slot), from, bytes, r_.come(slot));
  }
  /// Waits for the oldest piece that was loaded and not yet given. \returns its address
  __device__ __forceinline__ uint32_t next() {
    const uint32_t n = stores_++, slot = n & 1;
    if (lane() == 0) ptx::mbarrier_wait(r_.come(slot), n >> 1 & 1);
    return r_.piece(slot);
  }

 private:
  const LayerRoom& r_;
  uint32_t loads_ = 0, stores_ = 0;
};

/// This rank's tokens to where others read them. All threads of all blocks; no wait.
__device__ __forceinline__ void stage_tokens(const FusedParams& p) {
  if (p.x == nullptr) return;
  const int64_t vectors = p.most_tokens * p.layout.row_bytes / 16, step = int64_t{gridDim.x} * blockDim.x;
  const auto* const from = reinterpret_cast<const uint4*>(p.x);
  auto* const to = reinterpret_cast<uint4*>(p.call.heap.local(p.layout.x(0)));
  constexpr int kAtOnce = 4;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < vectors; i += kAtOnce * step) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (i + j * step < vectors) v[j] = __ldcs(from + i + j * step);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (i + j * step < vectors) to[i + j * step] = v[j];
  }
}

/// Tells the ranks of this rank's routes where their rows come from and go to, and that stage_tokens() is over. All threads of
/// all blocks; no wait.
__device__ __forceinline__ void tell_routes(const LayerCall& c) {
  const FusedParams& p = c.p;
  const CallContext& call = p.call;
  const RouteTables routes{p.ids, p.route_row, p.map, p.layout.topk};
  const int64_t count = c.tokens * routes.topk, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t f = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; f < count; f += step)
    tell_route(call.heap, p.layout, routes, f);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (ptx::add_acq_rel<Scope::device>(&p.memory.counters->told, 1) + 1 != gridDim.x) return;
  for (int i = 0; i < call.world(); ++i)
    ptx::store_release<Scope::system>(call.heap.at(call.in_turn(i), p.layout.told(call.rank())), c.word);
}

/// Stores the next piece to the rows that the first lanes name; the others name none, which is negative. `first`: its place in
/// row 0.
__device__ __forceinline__ void store_to_rows(Pieces& pieces, std::byte* first, int64_t row_bytes, int32_t row,
                                              uint32_t bytes) {
  const int rows = __popc(__ballot_sync(~0u, row >= 0));
  const uint32_t shared = pieces.next();
  for (int i = 0; i < rows; ++i) {
    const int32_t to = __shfl_sync(~0u, row, i);
    if (lane() == 0) ptx::bulk_store(first + to * row_bytes, shared, bytes);
  }
  if (lane() == 0) ptx::bulk_commit();
}
/// Tells that the row that each lane names has come.
__device__ __forceinline__ void announce(const LayerCall& c, int32_t row) {
  __syncwarp();
  if (row >= 0) ptx::store_release<Scope::device>(c.p.memory.arrived + row, c.word);
}

/// Rows of this rank's experts from their sources, ascending: each is read once and stored to all its places here.
__device__ __forceinline__ bool pull_rows(const LayerCall& c, Pieces& pieces, MoveCounter& moved) {
  const FusedParams& p = c.p;
  const CallContext& call = p.call;
  const int64_t row_bytes = p.layout.row_bytes;
  for (int first = 0; first < call.world(); first += 32) {
    const int source = first + lane() < call.world() ? first + lane() : call.rank();
    const uint64_t* const flag = call.heap.local(p.layout.told(source));
    if (!wait_until(c, Site::layer_told, source, [&] { return flag_reached(ptx::load_acquire<Scope::system>(flag), c.word); }))
      return false;
  }
  __syncwarp();
  ptx::fence_proxy_async();
  constexpr int kBatch = 8;
  int32_t to = -1, before = -1;  // of this lane: a place of the row whose piece is under way; of the row before it
  // The pieces of all rows form one sequence; a piece is stored once the next one is under way.
  bool under_way = false, last_piece = false;
  int64_t at = 0;
  uint32_t bytes = 0;
  const auto finish_piece = [&] {
    if (!under_way) return;
    store_to_rows(pieces, p.memory.x_rows + at, row_bytes, to, bytes);
    if (__any_sync(~0u, before >= 0)) {
      if (lane() == 0) ptx::bulk_wait_but<1>();
      announce(c, before);
      before = -1;
    }
    if (last_piece) before = to;
    under_way = false;
  };
  for (;;) {
    const int64_t base = take(&p.memory.counters->pulls, kBatch);
    if (base >= c.rows) break;
    const bool first = lane() < kBatch && base + lane() < c.rows && *call.heap.local(p.layout.places(base + lane())) >= 0;
    for (uint32_t left = __ballot_sync(~0u, first); left != 0; left &= left - 1) {
      const int64_t row = base + __ffs(static_cast<int>(left)) - 1;
      const int64_t source = *call.heap.local(p.layout.source(row));
      const std::byte* const from = call.heap.at(source_rank(source), p.layout.x(source_token(source)));
      const int32_t place = lane() < p.layout.topk ? call.heap.local(p.layout.places(row))[lane()] : -1;
      ++moved.payload_rows;
      (source_rank(source) == call.rank() ? moved.local_bytes : moved.remote_bytes) += static_cast<uint64_t>(row_bytes);
      for (int64_t b = 0; b < row_bytes; b += kPieceBytes) {
        const uint32_t n = static_cast<uint32_t>(row_bytes - b < kPieceBytes ? row_bytes - b : kPieceBytes);
        pieces.load(from + b, n);
        finish_piece();
        to = place;
        at = b;
        bytes = n;
        last_piece = b + kPieceBytes >= row_bytes;
        under_way = true;
      }
    }
  }
  finish_piece();
  if (lane() == 0) ptx::bulk_wait();
  announce(c, before);
  return true;
}

/// Outputs to their owners, tile by tile: those of other ranks travel, and those of this rank are told of.
__device__ __forceinline__ void return_rows(const LayerCall& c, const int* first_tiles, Pieces& pieces, MoveCounter& moved) {
  const FusedParams& p = c.p;
  const CallContext& call = p.call;
  const int64_t row_bytes = p.layout.row_bytes;
  constexpr int kParts = kFusedRows / kRowsAtOnce;
  const int experts = p.up.num_experts;
  const int64_t tasks = int64_t{first_tiles[experts]} * kParts;
  for (;;) {
    const int64_t task = take(&p.memory.counters->returns, 1);
    if (task >= tasks) break;
    const int tile = static_cast<int>(task / kParts), part = static_cast<int>(task % kParts);
    const int expert = expert_of_tile(first_tiles, experts, tile);
    const RowTile t = row_tile(gemm::rows_of(p.up.ranges, expert), tile - first_tiles[expert], kFusedRows);
    const int rows = t.rows - part * kRowsAtOnce < kRowsAtOnce ? t.rows - part * kRowsAtOnce : kRowsAtOnce;
    if (rows <= 0) continue;
    const int64_t first = gemm::first_row_of(p.up.ranges, expert) + t.first + part * kRowsAtOnce;
    const FlagRange tiles = awaited_by_return(tile, p.down.column_tiles);
    if (!wait_flags(c, Site::layer_tiles, p.memory.y_done + tiles.first, tiles.count)) return;
    __syncwarp();
    ptx::fence_proxy_async();
    const int64_t source = lane() < rows ? *call.heap.local(p.layout.source(first + lane())) : 0;
    const int owner = source_rank(source);
    const int64_t route = source_token(source) * p.layout.topk + source_k(source);
    std::byte* place = nullptr;  // the row travels there
    if (lane() < rows && owner != call.rank()) place = call.heap.at(owner, p.layout.inbox(route));
    moved.remote_bytes +=
        static_cast<uint64_t>(__popc(__ballot_sync(~0u, place != nullptr))) * static_cast<uint64_t>(row_bytes);
    bool under_way = false;
    std::byte* to = nullptr;
    uint32_t bytes = 0;
    const auto finish_piece = [&] {
      if (!under_way) return;
      const uint32_t shared = pieces.next();
      if (lane() == 0) {
        ptx::bulk_store(to, shared, bytes);
        ptx::bulk_commit();
      }
      under_way = false;
    };
    for (uint32_t left = __ballot_sync(~0u, place != nullptr); left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      auto* const there = reinterpret_cast<std::byte*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(place), i));
      const std::byte* const from = p.memory.y + (first + i) * row_bytes;
      for (int64_t b = 0; b < row_bytes; b += kPieceBytes) {
        const uint32_t n = static_cast<uint32_t>(row_bytes - b < kPieceBytes ? row_bytes - b : kPieceBytes);
        pieces.load(from + b, n);
        finish_piece();
        to = there + b;
        bytes = n;
        under_way = true;
      }
    }
    finish_piece();
    if (lane() == 0) ptx::bulk_wait();
    __syncwarp();
    if (lane() < rows) ptx::store_release<Scope::system>(call.heap.at(owner, p.layout.returned(route)), c.word);
  }
}

}  // namespace switchyard::detail::fused

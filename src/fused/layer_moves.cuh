// SPDX-License-Identifier: Apache-2.0
// Rows that travel: a block's warp that pulls rows of its experts from their sources and then returns outputs to their owners,
// in pieces through shared memory, by the copy engine; and sums of a token's rows, by any warp.
#pragma once

#include <cuda_bf16.h>

#include "fused/layer_room.cuh"

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

__device__ __forceinline__ int source_rank(int64_t source) { return static_cast<int>(source >> 48); }
__device__ __forceinline__ int source_k(int64_t source) { return static_cast<int>(source >> 32 & 0xffff); }
__device__ __forceinline__ int64_t source_token(int64_t source) { return source & 0xffffffff; }

/// Tells the ranks of this rank's routes where their rows come from. All threads of all blocks; no wait.
__device__ __forceinline__ void tell_routes(const LayerParams& p) {
  const int64_t routes = p.tokens * p.topk;
  for (int64_t f = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; f < routes; f += int64_t{gridDim.x} * blockDim.x) {
    const int64_t t = f / p.topk;
    const int32_t id = p.ids[f], row = p.route_row[f];
    if (id < 0 || row < 0) continue;
    const int rank = p.map.owner(id), first = p.map.first(rank), last = first + p.map.count(rank);
    const auto row_at = [&](int64_t g) { return p.ids[g] >= first && p.ids[g] < last ? p.route_row[g] : -1; };
    std::byte* const there = p.heap.base[rank];
    reinterpret_cast<int64_t*>(there + p.places.row_source)[row] =
        pack_source(p.heap.rank, static_cast<int>(f - t * p.topk), t);
    int32_t* const list = reinterpret_cast<int32_t*>(there + p.places.pull_rows) + int64_t{row} * p.topk;
    bool pulled = true;
    for (int64_t g = t * p.topk; g < (t + 1) * p.topk; ++g) {
      const int32_t other = row_at(g);
      pulled = pulled && (other < 0 || other >= row);
    }
    list[0] = pulled ? row : -1;
    if (!pulled) continue;
    int n = 1;
    for (int64_t g = t * p.topk; g < (t + 1) * p.topk; ++g)
      if (const int32_t other = row_at(g); other > row) list[n++] = other;
    for (; n < p.topk; ++n) list[n] = -1;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (ptx::add_acq_rel<Scope::device>(&p.counters->told, 1) + 1 != gridDim.x) return;
  for (int i = 0; i < p.heap.world; ++i) {
    const int r = (p.heap.rank + 1 + i) % p.heap.world;
    ptx::store_release<Scope::system>(reinterpret_cast<uint64_t*>(p.heap.base[r] + p.places.told) + p.heap.rank, p.epoch);
  }
}

/// Rows of this rank's experts from their sources, ascending: each is read once and stored to all its places here.
__device__ __forceinline__ bool pull_rows(const LayerParams& p, const LayerRoom& r, Pieces& pieces) {
  const std::byte* const mine = p.heap.base[p.heap.rank];
  const auto* const told = reinterpret_cast<const uint64_t*>(mine + p.places.told);
  if (!wait_until(p, r, Wait::told, [&] {
        bool all = true;
        for (int i = lane(); i < p.heap.world; i += 32) all = all && ptx::load_acquire<Scope::system>(told + i) == p.epoch;
        return all;
      }))
    return false;
  __syncwarp();
  ptx::fence_proxy_async();
  const auto* const row_source = reinterpret_cast<const int64_t*>(mine + p.places.row_source);
  const auto* const lists = reinterpret_cast<const int32_t*>(mine + p.places.pull_rows);
  constexpr int kBatch = 8;
    int32_t to = -1, before = -1;  // of this lane: a place of the row whose piece is under way; of the row before it
  const auto announce = [&](int32_t row) {
    __syncwarp();
    if (row >= 0) ptx::store_release<Scope::device>(p.arrived + row, p.epoch);
  };
  // The pieces of all rows form one sequence; a piece is stored once the next one is under way.
  bool under_way = false, last_piece = false;
  int64_t at = 0;
  uint32_t bytes = 0;
  const auto finish_piece = [&] {
    if (!under_way) return;
    const int places = __popc(__ballot_sync(~0u, to >= 0));
    const uint32_t shared = pieces.next();
    for (int i = 0; i < places; ++i) {
      const int32_t row = __shfl_sync(~0u, to, i);
      if (lane() == 0) ptx::bulk_store(p.x_rows + row * p.row_bytes + at, shared, bytes);
    }
    if (lane() == 0) ptx::bulk_commit();
    if (__any_sync(~0u, before >= 0)) {
      if (lane() == 0) ptx::bulk_wait_but<1>();
      announce(before);
      before = -1;
    }
    if (last_piece) before = to;
    under_way = false;
  };
  for (;;) {
    const int64_t base = take(&p.counters->pulls, kBatch);
    if (base >= p.rows) break;
    const bool first = lane() < kBatch && base + lane() < p.rows && lists[(base + lane()) * p.topk] >= 0;
    for (uint32_t left = __ballot_sync(~0u, first); left != 0; left &= left - 1) {
      const int64_t row = base + __ffs(static_cast<int>(left)) - 1;
      const int64_t source = row_source[row];
      const std::byte* const from = p.heap.base[source_rank(source)] + p.places.x + source_token(source) * p.row_bytes;
      const int32_t place = lane() < p.topk ? lists[row * p.topk + lane()] : -1;
      for (int64_t b = 0; b < p.row_bytes; b += kPieceBytes) {
        const uint32_t n = static_cast<uint32_t>(p.row_bytes - b < kPieceBytes ? p.row_bytes - b : kPieceBytes);
        pieces.load(from + b, n);
        finish_piece();
        to = place;
        at = b;
        bytes = n;
        last_piece = b + kPieceBytes >= p.row_bytes;
        under_way = true;
      }
    }
  }
  finish_piece();
  if (lane() == 0) ptx::bulk_wait();
  announce(before);
  return true;
}

/// Outputs to their owners, tile by tile: those of other ranks travel, and those of this rank are told of.
__device__ __forceinline__ void return_rows(const LayerParams& p, const LayerRoom& r, const int* first_tiles,
                                            Pieces& pieces) {
  constexpr int kParts = kWidest / kRowsAtOnce;
  const auto* const row_source = reinterpret_cast<const int64_t*>(p.heap.base[p.heap.rank] + p.places.row_source);
  const int experts = p.up.num_experts, columns = p.down.column_tiles;
  const int64_t tasks = int64_t{first_tiles[experts]} * kParts;
    for (;;) {
    const int64_t task = take(&p.counters->moves, 1);
    if (task >= tasks) break;
    const int tile = static_cast<int>(task / kParts), part = static_cast<int>(task % kParts);
    int low = 0, high = experts;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tiles[middle] <= tile)
        low = middle;
      else
        high = middle;
    }
    const RowTile t = row_tile(gemm::rows_of(p.up.ranges, low), tile - first_tiles[low], kWidest);
    const int rows = t.rows - part * kRowsAtOnce < kRowsAtOnce ? t.rows - part * kRowsAtOnce : kRowsAtOnce;
    if (rows <= 0) continue;
    const int64_t first = gemm::first_row_of(p.up.ranges, low) + t.first + part * kRowsAtOnce;
    const uint64_t* const done = p.y_done + int64_t{tile} * columns;
    if (!wait_until(p, r, Wait::y_done, [&] {
          bool all = true;
          for (int i = lane(); i < columns; i += 32) all = all && ptx::load_acquire<Scope::device>(done + i) == p.epoch;
          return all;
        }))
      return;
    __syncwarp();
    ptx::fence_proxy_async();
    const int64_t source = lane() < rows ? row_source[first + lane()] : 0;
    const int owner = source_rank(source);
    const int64_t slot = source_token(source) * p.topk + source_k(source);
    std::byte* place = nullptr;  // the row travels there
    if (lane() < rows && owner != p.heap.rank) place = p.heap.base[owner] + p.places.inbox + slot * p.row_bytes;
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
      const std::byte* const from = p.y + (first + i) * p.row_bytes;
      for (int64_t b = 0; b < p.row_bytes; b += kPieceBytes) {
        const uint32_t n = static_cast<uint32_t>(p.row_bytes - b < kPieceBytes ? p.row_bytes - b : kPieceBytes);
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
    if (lane() < rows)
      ptx::store_release<Scope::system>(reinterpret_cast<uint64_t*>(p.heap.base[owner] + p.places.returned) + slot, p.epoch);
  }
}

__device__ __forceinline__ void add_weighted(const uint4& v, float weight, float (&sum)[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(weight, __uint_as_float(words[i] << 16)));
    sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(weight, __uint_as_float(words[i] & 0xffff0000u)));
  }
}

/// Sums of tokens out of their routes' rows, k ascending, in float32 from +0, rounded once: as combine per_route. kVectors of
/// 16 bytes of each row, of kAtOnce rows, are under way in each lane.
template <int kVectors, int kAtOnce>
__device__ __forceinline__ void sum_tokens(const LayerParams& p, const LayerRoom& r) {
  const std::byte* const mine = p.heap.base[p.heap.rank];
  const auto* const returned = reinterpret_cast<const uint64_t*>(mine + p.places.returned);
  const std::byte* const inbox = mine + p.places.inbox;
  constexpr int kParts = 2;
  const int vectors = static_cast<int>(p.row_bytes / 16), each = (vectors + kParts - 1) / kParts;
  for (;;) {
    const int64_t item = take(&p.counters->tokens, 1);
    if (item >= p.tokens * kParts) break;
    const int64_t i = item / kParts, t = p.order ? p.order[i] : i;
    const int part = static_cast<int>(item % kParts);
    const int64_t f = t * p.topk + lane();
    const int32_t row = lane() < p.topk && p.ids[f] >= 0 ? p.route_row[f] : -1;
    const float weight = row >= 0 ? (p.weights ? p.weights[f] : 1.f) : 0.f;
    (void)wait_until(p, r, Wait::returned,
                     [&] { return row < 0 || ptx::load_acquire<Scope::system>(returned + f) == p.epoch; });
    __syncwarp();
    const std::byte* at = nullptr;
    if (row >= 0) at = p.map.owner(p.ids[f]) == p.heap.rank ? p.y + row * p.row_bytes : inbox + f * p.row_bytes;
    const uint32_t kept = __ballot_sync(~0u, row >= 0);
    const int end = (part + 1) * each < vectors ? (part + 1) * each : vectors;
    for (int v = part * each + lane(); v - lane() < end; v += 32 * kVectors) {
      float sum[kVectors][8] = {};
      for (uint32_t left = kept; left != 0;) {
        const int n = __popc(left);
        uint4 x[kAtOnce][kVectors];
        float w[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (j >= n) break;
          const int k = __ffs(static_cast<int>(left)) - 1;
          left &= left - 1;
          w[j] = __shfl_sync(~0u, weight, k);
          const auto* const from = reinterpret_cast<const uint4*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(at), k));
#pragma unroll
          for (int u = 0; u < kVectors; ++u)
            if (v + 32 * u < end) x[j][u] = __ldcs(from + v + 32 * u);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (j >= n) break;
#pragma unroll
          for (int u = 0; u < kVectors; ++u) add_weighted(x[j][u], w[j], sum[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (v + 32 * u >= end) continue;
        uint4 o;
        o.x = gemm::pack<__nv_bfloat16>(sum[u][0], sum[u][1]);
        o.y = gemm::pack<__nv_bfloat16>(sum[u][2], sum[u][3]);
        o.z = gemm::pack<__nv_bfloat16>(sum[u][4], sum[u][5]);
        o.w = gemm::pack<__nv_bfloat16>(sum[u][6], sum[u][7]);
        reinterpret_cast<uint4*>(p.out + t * p.row_bytes)[v + 32 * u] = o;
      }
    }
  }
}

}  // namespace switchyard::detail::fused

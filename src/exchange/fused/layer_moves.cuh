// SPDX-License-Identifier: Apache-2.0
// Rows that travel: a block's warp that pulls rows of its experts from their sources and then returns outputs to their owners,
// in pieces through shared memory, by the copy engine.
#pragma once

#include "arch/cuda/cuda_quantize.cuh"
#include "exchange/fused/layer_room.cuh"
#include "protocol/fused/routes.hpp"

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
    ptx::mbarrier_wait(r_.come(slot), n >> 1 & 1);
    return r_.piece(slot);
  }

 private:
  const LayerRoom& r_;
  uint32_t loads_ = 0, stores_ = 0;
};

/// Tokens in parts, which blocks take: two for each, so that all end at about the same time.
struct TokenParts {
  int64_t tokens, each;

  __device__ TokenParts(const FusedParams& p, int64_t number) : tokens(number) {
    const int64_t parts = 2 * int64_t{gridDim.x};
    each = (p.most_tokens + parts - 1) / parts;
    if (each == 0) each = 1;
  }
  /// At least one, so that somebody tells.
  __device__ int64_t count() const { return tokens > 0 ? (tokens + each - 1) / each : 1; }
  __device__ int64_t begin(int64_t part) const { return part * each; }
  __device__ int64_t end(int64_t part) const { return begin(part) + each < tokens ? begin(part) + each : tokens; }
};
/// All threads of a block: `each(part)` for the parts that it takes. `shared`: four bytes of shared memory. Returns their
/// number; all threads have ended them then.
template <class Each>
__device__ __forceinline__ int64_t take_parts(uint64_t* counter, const TokenParts& parts, uint32_t shared, Each each) {
  for (int64_t taken = 0;; ++taken) {
    __syncthreads();
    if (threadIdx.x == 0) ptx::store_shared(shared, static_cast<uint32_t>(ptx::add_relaxed(counter, 1)));
    __syncthreads();
    const int64_t part = ptx::load_shared(shared);
    if (part >= parts.count()) return taken;
    each(part);
  }
}

/// Pieces [begin, end), of 16 bytes, of all tokens. All threads of a block.
__device__ __forceinline__ void copy_tokens(const FusedParams& p, int64_t begin, int64_t end) {
  const auto* const from = reinterpret_cast<const uint4*>(p.x);
  auto* const to = reinterpret_cast<uint4*>(p.call.heap.local(p.layout.x(0)));
  constexpr int kAtOnce = 4;
  const int64_t step = blockDim.x;
  for (int64_t i = begin + threadIdx.x; i < end; i += kAtOnce * step) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (i + j * step < end) v[j] = __ldcs(from + i + j * step);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (i + j * step < end) to[i + j * step] = v[j];
  }
}
/// The same, as fp8: a token's elements, then a float32 scale for each 128 of them, whatever the kind of scale. `begin` is a
/// multiple of 16: 16 lanes have a group.
__device__ __forceinline__ void quantise_tokens(const FusedParams& p, int64_t begin, int64_t end) {
  const auto* const from = reinterpret_cast<const uint4*>(p.x);
  std::byte* const to = p.call.heap.local(p.layout.x(0));
  const auto in_token = static_cast<uint32_t>(p.up.inner_blocks) * 16;
  const ScaleKind kind = p.ue8m0 ? ScaleKind::ue8m0 : ScaleKind::f32;
  constexpr int kAtOnce = 4;
  const int64_t step = blockDim.x;
  for (int64_t first = begin + (threadIdx.x & ~31u); first < end; first += kAtOnce * step) {
    const int64_t i = first + lane();
    RawColumns<1> raw[kAtOnce] = {};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (i + j * step < end) raw[j].eight[0].low = __ldcs(from + i + j * step);
#pragma unroll 1
    for (int j = 0; j < kAtOnce; ++j) {
      const QuantizedColumns<1> q = quantize_columns<DType::bf16, 1, true>(raw[0], 16, kind);
#pragma unroll
      for (int k = 1; k < kAtOnce; ++k) raw[k - 1] = raw[k];
      const int64_t at = i + j * step;
      if (at >= end) continue;
      const auto piece = static_cast<uint32_t>(at % in_token);
      std::byte* const token = to + at / in_token * p.layout.x_bytes;
      *reinterpret_cast<uint2*>(token + piece * 8) = q.bytes[0];
      if (piece % 16 == 0)
        reinterpret_cast<float*>(token + in_token * 8)[piece / 16] =
            p.ue8m0 ? f32_from_ue8m0(static_cast<uint8_t>(q.scale)) : __uint_as_float(q.scale);
    }
  }
}
/// This rank's tokens to where others read them. All threads of a block; no wait. \returns parts that the block has done
template <class L>
__device__ __forceinline__ int64_t stage_tokens(const FusedParams& p, uint32_t shared) {
  if (p.x == nullptr) return 0;
  const TokenParts parts(p, p.most_tokens);
  const int64_t pieces = p.layout.row_bytes / 16;
  return take_parts(&p.memory.counters->stagings, parts, shared, [&](int64_t part) {
    if constexpr (L::kFp8)
      quantise_tokens(p, parts.begin(part) * pieces, parts.end(part) * pieces);
    else
      copy_tokens(p, parts.begin(part) * pieces, parts.end(part) * pieces);
  });
}

/// Tells the ranks of this rank's routes what they must know, and, once all parts of this and of stage_tokens() are done, that
/// it is there. All threads of a block, which has done `staged` of those; no wait.
__device__ __forceinline__ void tell_routes(const LayerCall& c, int64_t staged, uint32_t shared) {
  const FusedParams& p = c.p;
  const CallContext& call = p.call;
  const TokenParts parts(p, c.tokens);
  const RouteTables routes{p.ids, p.route_row, p.map, p.layout.topk};
  const int topk = routes.topk;
  const int64_t done = staged + take_parts(&p.memory.counters->tellings, parts, shared, [&](int64_t part) {
                         for (int64_t f = parts.begin(part) * topk + threadIdx.x; f < parts.end(part) * topk; f += blockDim.x)
                           tell_route(call.heap, p.layout, routes, f);
                       });
  if (threadIdx.x != 0 || done == 0) return;
  const int64_t all = parts.count() + (p.x != nullptr ? TokenParts(p, p.most_tokens).count() : 0);
  const uint64_t before = ptx::add_acq_rel<Scope::device>(&p.memory.counters->told, static_cast<uint64_t>(done));
  if (before + static_cast<uint64_t>(done) != static_cast<uint64_t>(all)) return;
  for (int i = 0; i < call.world(); ++i)
    ptx::store_release<Scope::system>(call.heap.at(call.in_turn(i), p.layout.told(call.rank())), c.word);
}

/// A piece of a row that travels in pieces of `each` bytes.
struct RowPiece {
  int64_t at;
  uint32_t bytes;
  bool last;

  __device__ __forceinline__ RowPiece(int64_t begin, int64_t row_bytes, uint32_t each)
      : at(begin),
        bytes(row_bytes - begin < each ? static_cast<uint32_t>(row_bytes - begin) : each),
        last(row_bytes - begin <= each) {}
};

/// Stores the next piece to the rows that the first lanes name; the others name none, which is negative. Of fp8, the last piece
/// ends with the row's scales.
template <class L>
__device__ __forceinline__ void store_to_rows(const FusedParams& p, Pieces& pieces, const RowPiece& piece, int32_t row) {
  const int rows = __popc(__ballot_sync(~0u, row >= 0));
  const uint32_t shared = pieces.next();
  const int64_t element_bytes = L::kFp8 ? int64_t{p.up.inner_blocks} * gemm::kFp8Inner : p.layout.x_bytes;
  const auto bytes = piece.last ? static_cast<uint32_t>(element_bytes - piece.at) : piece.bytes;
  for (int i = 0; i < rows; ++i) {
    const int32_t to = __shfl_sync(~0u, row, i);
    if (lane() == 0) ptx::bulk_store(p.memory.x_rows + to * element_bytes + piece.at, shared, bytes);
    if constexpr (L::kFp8) {
      if (!piece.last) continue;
      for (int g = lane(); g < p.up.inner_blocks; g += 32)
        p.memory.x_scales[g * p.memory.scale_pitch + to] =
            ptx::load_shared_float(shared + bytes + static_cast<uint32_t>(g) * 4);
    }
  }
  if (lane() == 0) ptx::bulk_commit();
  if constexpr (L::kFp8) __syncwarp();  // all lanes have read what the next piece overwrites
}
/// Tells that the row that each lane names has come.
__device__ __forceinline__ void announce(const LayerCall& c, int32_t row) {
  __syncwarp();
  if (row >= 0) ptx::store_release<Scope::device>(c.p.memory.arrived + row, c.word);
}

/// Rows of this rank's experts from their sources, ascending: each is read once and stored to all its places here.
template <class A, class L>
__device__ __forceinline__ bool pull_rows(const LayerCall& c, Pieces& pieces, MoveCounter& moved) {
  const FusedParams& p = c.p;
  const CallContext& call = p.call;
  const int64_t row_bytes = p.layout.x_bytes;
  for (int first = 0; first < call.world(); first += 32) {
    const int source = first + lane() < call.world() ? first + lane() : call.rank();
    const uint64_t* const flag = call.heap.local(p.layout.told(source));
    if (!wait_until<A>(c, Site::layer_told, Event::wait_told, source,
                       [&] { return flag_reached(ptx::load_acquire<Scope::system>(flag), c.word); }))
      return false;
  }
  __syncwarp();
  ptx::fence_proxy_async();
  const RoleSpan<A> span(Event::pull_rows);
  constexpr int kBatch = 8;
  int32_t to = -1, before = -1;  // of this lane: a place of the row whose piece is under way; of the row before it
  // The pieces of all rows form one sequence; a piece is stored once the next one is under way.
  bool under_way = false;
  RowPiece now(0, 0, 0);
  const auto finish_piece = [&] {
    if (!under_way) return;
    store_to_rows<L>(p, pieces, now, to);
    if (__any_sync(~0u, before >= 0)) {
      if (lane() == 0) ptx::bulk_wait_but<1>();
      announce(c, before);
      before = -1;
    }
    if (now.last) before = to;
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
      for (int64_t b = 0; b < row_bytes; b += p.pulled_piece) {
        const RowPiece piece(b, row_bytes, p.pulled_piece);
        pieces.load(from + b, piece.bytes);
        finish_piece();
        to = place;
        now = piece;
        under_way = true;
      }
    }
  }
  finish_piece();
  if (lane() == 0) ptx::bulk_wait();
  announce(c, before);
  span.end(static_cast<int64_t>(moved.payload_rows), record_bytes(moved.remote_bytes));
  return true;
}

/// Rows that are returned together: some of a row tile, or none behind its end.
struct ReturnedRows {
  int tile, rows;
  int64_t first;
};
template <class L>
inline constexpr int kReturnsOfTile = L::kRows / kRowsAtOnce;
template <class L>
__device__ __forceinline__ ReturnedRows returned_rows(const FusedParams& p, const int* first_tiles, int64_t task) {
  const int tile = static_cast<int>(task / kReturnsOfTile<L>),
            before = static_cast<int>(task % kReturnsOfTile<L>) * kRowsAtOnce;
  const int expert = expert_of_tile(first_tiles, p.up.num_experts, tile);
  const RowTile t = L::tile(gemm::rows_of(p.up.ranges, expert), tile - first_tiles[expert]);
  const int left = t.rows - before;
  return {tile, left < kRowsAtOnce ? left : kRowsAtOnce, gemm::first_row_of(p.up.ranges, expert) + t.first + before};
}

/// Outputs to their owners, tile by tile: those of other ranks travel, and those of this rank are told of.
template <class A, class L>
__device__ __forceinline__ void return_rows(const LayerCall& c, const int* first_tiles, Pieces& pieces, MoveCounter& moved) {
  const FusedParams& p = c.p;
  const CallContext& call = p.call;
  const int64_t row_bytes = p.layout.row_bytes;
  const int64_t tasks = int64_t{first_tiles[p.up.num_experts]} * kReturnsOfTile<L>;
  for (;;) {
    const int64_t task = take(&p.memory.counters->returns, 1);
    if (task >= tasks) break;
    const ReturnedRows r = returned_rows<L>(p, first_tiles, task);
    if (r.rows <= 0) continue;
    const FlagRange tiles = awaited_by_return(r.tile, p.down.column_tiles * L::kWriters);
    if (!wait_flags<A>(c, Site::layer_tiles, Event::wait_tiles, p.memory.y_done + tiles.first, tiles.count)) return;
    __syncwarp();
    const RoleSpan<A> span(Event::return_rows);
    ptx::fence_proxy_async();
    const int64_t source = lane() < r.rows ? *call.heap.local(p.layout.source(r.first + lane())) : 0;
    const int owner = source_rank(source);
    const int64_t route = source_token(source) * p.layout.topk + source_k(source);
    std::byte* place = nullptr;  // the row travels there
    if (lane() < r.rows && owner != call.rank()) place = call.heap.at(owner, p.layout.inbox(route));
    const uint64_t leaves =
        static_cast<uint64_t>(__popc(__ballot_sync(~0u, place != nullptr))) * static_cast<uint64_t>(row_bytes);
    moved.remote_bytes += leaves;
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
      const std::byte* const from = p.memory.y + (r.first + i) * row_bytes;
      for (int64_t b = 0; b < row_bytes; b += p.returned_piece) {
        const RowPiece piece(b, row_bytes, p.returned_piece);
        pieces.load(from + b, piece.bytes);
        finish_piece();
        to = there + b;
        bytes = piece.bytes;
        under_way = true;
      }
    }
    finish_piece();
    if (lane() == 0) ptx::bulk_wait();
    __syncwarp();
    if (lane() < r.rows) ptx::store_release<Scope::system>(call.heap.at(owner, p.layout.returned(route)), c.word);
    __syncwarp();
    span.end(r.rows, record_bytes(leaves));
  }
}

}  // namespace switchyard::detail::fused

// SPDX-License-Identifier: Apache-2.0
// Incoming rows: tokens are staged in memory that other ranks read, and one warp per block uses the copy engine to pull rows
// for the rank's experts from their sources, in pieces through shared memory.
#pragma once

#include "arch/cuda/cuda_quantize.cuh"
#include "exchange/fused/layer_storage.cuh"
#include "protocol/fused/routes.hpp"

namespace switchyard::detail::fused {

/// Moves a warp's rows through the block's piece storage. Each round loads some slots and then stores them, so the copies of a
/// round are in flight together. Each lane waits only for its own copies.
class Pieces {
 public:
  __device__ Pieces(const LayerStorage& r, const CopyPlan& plan) : r_(r), plan_(plan) {}
  /// Sets the row transfer format for the following rounds.
  __device__ __forceinline__ void use(const CopyPlan& plan) { plan_ = plan; }

  /// Waits until the slots may be reloaded. Call from all lanes.
  __device__ __forceinline__ void begin_round() const {
    ptx::bulk_wait_read();
    __syncwarp();  // lanes have also finished reading the slots
  }
  /// Starts loading a slot. Call from one lane for each slot of the round, starting with slot 0.
  __device__ __forceinline__ void load(int slot, const std::byte* from, uint32_t bytes) const {
    const uint32_t row_arrived = r_.row_arrived(static_cast<uint32_t>(slot));
    ptx::mbarrier_expect(row_arrived, bytes);
    ptx::bulk_load(at(slot), from, bytes, row_arrived);
  }
  /// Waits until the round's first `slots` slots are loaded. Call from all lanes.
  __device__ __forceinline__ void wait(int slots) {
    for (int i = 0; i < slots; ++i) {
      ptx::mbarrier_wait(r_.row_arrived(static_cast<uint32_t>(i)), phases_ >> i & 1);
      phases_ ^= 1U << i;
    }
  }
  __device__ __forceinline__ uint32_t at(int slot) const { return r_.pieces + static_cast<uint32_t>(slot) * plan_.pitch; }

  /// Treats the storage as two halves of kPieceBytes bytes, whose loads are independent. Starts loading `bytes` bytes from the
  /// `from` of each lane below `rows` to half `i`, `pitch` bytes apart. Call from all lanes, not between load() and wait().
  __device__ __forceinline__ void load_rows(int i, uint32_t rows, const std::byte* from, uint32_t pitch, uint32_t bytes) const {
    const uint32_t arrived = r_.row_arrived(static_cast<uint32_t>(i)), row = static_cast<uint32_t>(lane());
    if (row == 0) ptx::mbarrier_expect(arrived, rows * bytes);
    __syncwarp();
    if (row < rows) ptx::bulk_load(half(i) + row * pitch, from, bytes, arrived);
  }
  /// Waits until half `i` is loaded. Call from all lanes.
  __device__ __forceinline__ void wait_half(int i) {
    ptx::mbarrier_wait(r_.row_arrived(static_cast<uint32_t>(i)), phases_ >> i & 1);
    phases_ ^= 1U << i;
  }
  __device__ __forceinline__ uint32_t half(int i) const { return r_.pieces + static_cast<uint32_t>(i) * kPieceBytes; }

 private:
  const LayerStorage& r_;
  CopyPlan plan_;
  uint32_t phases_ = 0;
};

/// Number of token parts per block. Staging: four, because blocks begin at different times, as the finishing plan kernel frees
/// multiprocessors. Announcing: one, because all threads of all blocks begin it together.
inline constexpr int kStagedParts = 4, kAnnouncedParts = 1;
/// Tokens divided into parts, which blocks claim dynamically.
struct TokenParts {
  int64_t tokens, each;

  __device__ TokenParts(const FusedParams& p, int64_t number, int of_block) : tokens(number) {
    const int64_t parts = of_block * int64_t{gridDim.x};
    each = (p.max_tokens + parts - 1) / parts;
    if (each == 0) each = 1;
  }
  /// At least one, so that some block announces the routes.
  __device__ int64_t count() const { return tokens > 0 ? (tokens + each - 1) / each : 1; }
  __device__ int64_t begin(int64_t part) const { return part * each; }
  __device__ int64_t end(int64_t part) const { return begin(part) + each < tokens ? begin(part) + each : tokens; }
};
/// Calls `each(part)` for each part that the block claims. Call from all threads of a block. `shared`: four bytes of shared
/// memory. Returns the number of parts after all threads have finished them.
template <class Each>
__device__ __forceinline__ int64_t take_parts(uint64_t* counter, const TokenParts& parts, uint32_t shared, Each each) {
  uint64_t next = threadIdx.x == 0 ? ptx::add_relaxed(counter, 1) : 0;
  for (int64_t taken = 0;; ++taken) {
    __syncthreads();
    if (threadIdx.x == 0) ptx::store_shared(shared, static_cast<uint32_t>(next));
    __syncthreads();
    const int64_t part = ptx::load_shared(shared);
    if (part >= parts.count()) return taken;
    if (threadIdx.x == 0) next = ptx::add_relaxed(counter, 1);  // arrives while this part is processed
    each(part);
  }
}

/// Copies 16-byte pieces [begin, end) of the concatenated tokens. Call from all threads of a block.
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
/// copy_tokens() with quantization to fp8: a token's elements are followed by one float32 scale per 128 elements, for either
/// scale kind. `begin` must be a multiple of 16 because 16 lanes process each group.
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
/// Copies this rank's tokens to the memory that other ranks read. Call from all threads of a block; does not wait. \returns the
/// number of parts that the block has done
template <class L>
__device__ __forceinline__ int64_t stage_tokens(const FusedParams& p, uint32_t shared) {
  if (p.x == nullptr) return 0;
  const TokenParts parts(p, p.max_tokens, kStagedParts);
  const int64_t pieces = p.layout.row_bytes / 16;
  return take_parts(&p.memory.counters->stagings, parts, shared, [&](int64_t part) {
    if constexpr (L::kFp8)
      quantise_tokens(p, parts.begin(part) * pieces, parts.end(part) * pieces);
    else
      copy_tokens(p, parts.begin(part) * pieces, parts.end(part) * pieces);
  });
}

/// Announces this rank's routes to the destination ranks and sets the flag once all parts of this and of stage_tokens() are
/// done. Call from all threads of a block that has completed `staged` parts of stage_tokens(); does not wait.
template <bool kPerRank>
__device__ __forceinline__ void publish_routes(const LayerCall& c, int64_t staged, uint32_t shared) {
  const FusedParams& p = c.p;
  const CallContext& call = p.call;
  const TokenParts parts(p, c.tokens, kAnnouncedParts);
  const RouteTables routes{p.ids, p.route_row, p.map, p.layout.topk, p.weights};
  const int topk = routes.topk;
  const int64_t done = staged + take_parts(&p.memory.counters->announcements, parts, shared, [&](int64_t part) {
                         for (int64_t f = parts.begin(part) * topk + threadIdx.x; f < parts.end(part) * topk; f += blockDim.x)
                           publish_route<kPerRank>(call.heap, p.layout, routes, f);
                       });
  if (threadIdx.x != 0 || done == 0) return;
  const int64_t all = parts.count() + (p.x != nullptr ? TokenParts(p, p.max_tokens, kStagedParts).count() : 0);
  const uint64_t before = ptx::add_acq_rel<Scope::device>(&p.memory.counters->announced, static_cast<uint64_t>(done));
  if (before + static_cast<uint64_t>(done) != static_cast<uint64_t>(all)) return;
  for (int i = 0; i < call.world(); ++i)
    ptx::store_release<Scope::system>(call.heap.at(call.in_turn(i), p.layout.announced(call.rank())), c.word);
}

/// A row piece starting at `at`. If a row fits into a slot, the piece is the whole row.
struct RowPiece {
  int64_t at;
  uint32_t bytes;
  bool last;

  __device__ __forceinline__ RowPiece(int64_t begin, int64_t row_bytes, uint32_t each)
      : at(begin),
        bytes(row_bytes - begin < each ? static_cast<uint32_t>(row_bytes - begin) : each),
        last(row_bytes - begin <= each) {}
};
/// Slots in a round: `rows` if each row fits into one slot; otherwise, the slots for the rest of one row, starting at `begin`.
__device__ __forceinline__ int slots_of_round(const CopyPlan& plan, int64_t row_bytes, int rows, int64_t begin) {
  if (plan.whole) return rows;
  const int64_t pieces = (row_bytes - begin + plan.piece - 1) / plan.piece;
  return pieces < plan.slots ? static_cast<int>(pieces) : plan.slots;
}

/// The `count` rows pulled by a round. Each row has `topk` lanes, rounded up to a power of two. Each lane holds the row's
/// source and one of its positions on this rank, or -1.
struct PulledRows {
  int count = 0, of_row = 1, mine = 0;  ///< of_row: lanes per row; mine: this lane's row
  int64_t source = 0;
  int32_t place = -1;
};
/// The rows that this warp claims; for each token, only its lowest row on this rank. One warp per block pulls.
class PulledSequence {
 public:
  __device__ explicit PulledSequence(const LayerCall& c) : c_(c) {
    while (of_row_ < c.p.layout.topk) of_row_ *= 2;
  }
  /// Returns at most as many rows as a round has slots; none when no rows are left. Call from all lanes.
  __device__ __forceinline__ PulledRows next() {
    const FusedParams& p = c_.p;
    const HeapView& heap = p.call.heap;
    const PullOrder order{static_cast<int>(gridDim.x), p.pulled.at_once};
    while (left_ == 0) {
      ticket_ = static_cast<int>(take(&p.memory.counters->pulls, 1));
      if (pulled_stretch(order, ticket_) >= c_.rows) return {};
      const int64_t row = pulled_row(order, ticket_, lane());
      left_ = __ballot_sync(~0u, lane() < order.together && row < c_.rows && *heap.local(p.layout.places(row)) >= 0);
    }
    PulledRows r;
    r.of_row = of_row_;
    r.mine = lane() / of_row_;
    int64_t row = 0;
    const int max = p.pulled.whole ? p.pulled.slots : 1;
    for (; r.count < max && left_ != 0; ++r.count, left_ &= left_ - 1)
      if (r.count == r.mine) row = pulled_row(order, ticket_, __ffs(static_cast<int>(left_)) - 1);
    if (r.mine >= r.count) return r;
    r.source = *heap.local(p.layout.source(row));
    const int i = lane() % of_row_;
    if (i < p.layout.topk) r.place = heap.local(p.layout.places(row))[i];
    return r;
  }

 private:
  const LayerCall& c_;
  int of_row_ = 1, ticket_ = 0;
  uint32_t left_ = 0;
};

/// Stores a round's loaded pieces at the positions of their rows. fp8: the last piece of a row ends with its scales.
template <class L>
__device__ __forceinline__ void store_pulled(const FusedParams& p, const Pieces& pieces, const PulledRows& r, int64_t begin,
                                             int slots) {
  const int64_t element_bytes = L::kFp8 ? int64_t{p.up.inner_blocks} * gemm::kFp8Inner : p.layout.x_bytes;
  const bool whole = p.pulled.whole;
  for (int slot = 0; slot < slots; ++slot) {
    const RowPiece piece(whole ? 0 : begin + slot * int64_t{p.pulled.piece}, p.layout.x_bytes, p.pulled.piece);
    const auto bytes = piece.last ? static_cast<uint32_t>(element_bytes - piece.at) : piece.bytes;
    const bool stores = r.place >= 0 && (!whole || r.mine == slot);
    if (stores) ptx::bulk_store(p.memory.x_rows + r.place * p.layout.row_bytes + piece.at, pieces.at(slot), bytes);
    if constexpr (L::kFp8) {
      if (!piece.last) continue;
      for (uint32_t left = __ballot_sync(~0u, stores); left != 0; left &= left - 1) {
        const int32_t to = __shfl_sync(~0u, r.place, __ffs(static_cast<int>(left)) - 1);
        for (int g = lane(); g < p.up.inner_blocks; g += 32)
          p.memory.x_scales[g * p.memory.scale_pitch + to] =
              ptx::load_shared_float(pieces.at(slot) + bytes + static_cast<uint32_t>(g) * 4);
      }
    }
  }
  ptx::bulk_commit();
  // The scales are read by ordinary loads from memory that the next round's copies overwrite.
  if constexpr (L::kFp8) ptx::fence_proxy_async_shared();
}
/// Waits for this lane's stores, then sets the flags of the rows passed by the lanes.
__device__ __forceinline__ void announce(const LayerCall& c, int32_t row) {
  ptx::bulk_wait();
  __syncwarp();
  if (row >= 0) ptx::store_release<Scope::device>(c.p.memory.arrived + row, c.word);
}

/// Waits until all ranks' tokens and this rank's positions may be read, including by copies. Returns false after a fault.
template <class A>
__device__ __forceinline__ bool await_announced(const LayerCall& c) {
  const CallContext& call = c.p.call;
  for (int first = 0; first < call.world(); first += 32) {
    const int source = first + lane() < call.world() ? first + lane() : call.rank();
    const uint64_t* const flag = call.heap.local(c.p.layout.announced(source));
    if (!wait_until<A>(c, Site::layer_told, Event::wait_told, source, [&] { return ptx::load_acquire<Scope::system>(flag); }))
      return false;
  }
  __syncwarp();
  ptx::fence_proxy_async_global();
  return true;
}

/// Pulls the rows of this rank's experts from their sources in ascending order. Each row is read once and stored at all its
/// positions on this rank. Returns false after a fault.
template <class A, class L>
__device__ __forceinline__ bool pull_rows(const LayerCall& c, Pieces& pieces, MoveCounter& moved) {
  const FusedParams& p = c.p;
  const CallContext& call = p.call;
  const int64_t row_bytes = p.layout.x_bytes;
  if (!await_announced<A>(c)) return false;
  const RoleSpan<A> span(Event::pull_rows);
  PulledSequence rows(c);
  PulledRows now = rows.next();
  int32_t before = -1;  // this lane's position in the previous round
  while (now.count > 0) {
    const auto from = reinterpret_cast<uint64_t>(call.heap.at(source_rank(now.source), p.layout.x(source_token(now.source))));
    const bool speaks = lane() % now.of_row == 0 && now.mine < now.count;
    const int remote = __popc(__ballot_sync(~0u, speaks && source_rank(now.source) != call.rank()));
    moved.payload_rows += static_cast<uint64_t>(now.count);
    moved.remote_bytes += static_cast<uint64_t>(remote * row_bytes);
    moved.local_bytes += static_cast<uint64_t>((now.count - remote) * row_bytes);
    PulledRows then;
    for (int64_t begin = 0; begin < row_bytes; begin += p.pulled.round_bytes()) {
      const int slots = slots_of_round(p.pulled, row_bytes, now.count, begin);
      pieces.begin_round();
      const auto* const row =
          reinterpret_cast<const std::byte*>(__shfl_sync(~0u, from, p.pulled.whole ? lane() * now.of_row % 32 : 0));
      const RowPiece piece(p.pulled.whole ? 0 : begin + lane() * int64_t{p.pulled.piece}, row_bytes, p.pulled.piece);
      if (lane() < slots) pieces.load(lane(), row + piece.at, piece.bytes);
      if (begin == 0) {  // while the copies are in flight
        announce(c, before);
        then = rows.next();
      }
      pieces.wait(slots);
      store_pulled<L>(p, pieces, now, begin, slots);
    }
    before = now.place;
    now = then;
  }
  announce(c, before);
  span.end(static_cast<int64_t>(moved.payload_rows), record_bytes(moved.remote_bytes));
  return true;
}

}  // namespace switchyard::detail::fused

// SPDX-License-Identifier: Apache-2.0
// A complete MoE layer after its plan, executed by warps that perform its steps one after another. In this order, each warp
// announces its tokens' routes, pulls rows for the rank's experts from their sources, computes tiles of both products, returns
// outputs to their owners, and sums tokens. Warps claim rows, tiles and tokens through per-rank counters. The GPU kernel
// (exchange/fused) has the same flags and tickets, but uses separate warps for each step.
//
// | flag           | written by                        | read by             | order           | scope  | reuse              |
// | layer_told     | source's last announcing warp     | all warps           | release/acquire | system | epoch, never reset |
// | layer_rows     | warp that pulled the row          | tiles up            | release/acquire | device | epoch, never reset |
// | layer_tiles    | warp that computed the tile       | tiles down, returns | release/acquire | device | epoch, never reset |
// | layer_returned | warp of the expert's rank, a row  | owner's sums        | release/acquire | system | epoch, never reset |
//
// Order per_route: each output returns to its owner, which weights and sums them. per_rank: the rank of the experts sums the
// weighted outputs of each token, once the token's last row is complete, and this sum returns; the owner adds the ranks' sums.
//
// Progress: announcements do not wait, and pulls wait only for `layer_told`. A warp claims tickets only after all rows have
// been claimed, so every row that an up tile waits for is held by a warp that is not waiting. A down tile waits for up tiles
// with lower tickets (tickets.hpp), a return waits for tiles (per_rank: its own and all before it), and a sum waits for returns
// from all ranks; nothing waits for returns but sums, and nothing waits for sums. A rank may therefore have any number of
// warps, even one, but all of them must eventually run, because each announces its share of the tokens.
//
// Buffers: every call follows a plan, in which each rank signals to all other ranks that its previous call has ended. `source`,
// `places`, their weights and the inbox at another rank may therefore be written immediately. When this rank's previous call
// has ended, other ranks have finished reading its layout.x(), because it has received the outputs of all its rows. A call of
// the first half alone must therefore be followed by one of the second half, which has no separate plan.
#pragma once

#include "layout/fused_layout.hpp"
#include "protocol/fused/routes.hpp"
#include "protocol/fused/tickets.hpp"
#include "protocol/wait.hpp"

namespace switchyard::detail {

/// Trivially copyable. Each expert's rows are contiguous, and experts follow one another without padding.
struct FusedLayerParams {
  CallContext call;
  FusedLayout layout;
  FusedMemory memory;
  RouteTables routes;  ///< for this rank's tokens
  TicketOrder order;   ///< for the rank's experts; a product that is not part of the call has no columns
  FusedParts parts;
  const int64_t* tile_row = nullptr;  ///< [row tiles + 1] first row of each, ascending; the last entry: total number of rows
  int64_t tokens = 0;                 ///< T
  const std::byte* x = nullptr;       ///< [T, H]; null: already at layout.x()
  const float* weights = nullptr;     ///< per_route: [T, K], or null: all 1; per_rank: routes.weights instead
  std::byte* out = nullptr;           ///< [T, H]
  bool add = false;                   ///< sums start from the contents of `out`
  DType type = DType::bf16;           ///< of tokens and outputs
  int64_t hidden = 0;
};

/// A tile as passed to the products.
struct FusedTile {
  int expert;   ///< index among the rank's experts
  bool down;    ///< reads memory.h and writes memory.y; else reads memory.x_rows and writes memory.h
  int index;    ///< index of the row tile among all row tiles of the rank
  int64_t row;  ///< index of its first row among the rank's rows
  int rows;
  int column_tile;  ///< index among the column tiles of the product
};

/// Row tile `index` of the rank. The caller sets the product and the column tile.
SWITCHYARD_FN inline FusedTile fused_row_tile(const FusedLayerParams& p, int expert, int index) {
  const int64_t row = p.tile_row[index];
  return {expert, false, index, row, static_cast<int>(p.tile_row[index + 1] - row), 0};
}
/// The row tiles of a column tile have consecutive tickets, so that the column tile's weights are read from the cache.
SWITCHYARD_FN inline FusedTile fused_tile_of(const FusedLayerParams& p, uint32_t ticket) {
  const TicketPlace place = ticket_place(p.order, ticket);
  const int first = p.order.first_tiles[place.expert], row_tiles = p.order.first_tiles[place.expert + 1] - first;
  FusedTile tile = fused_row_tile(p, place.expert, first + place.at % row_tiles);
  tile.down = place.down;
  tile.column_tile = place.at / row_tiles;
  return tile;
}

/// Waits for `n` flags of this call; flag(i) is written by rank writer(i). Traces record the wait as `event` unless all flags
/// were already set.
template <class A, class Flag, class Writer>
SWITCHYARD_FN bool wait_layer_flags(typename A::Warp& w, const FusedLayerParams& p, int n, const Flag& flag, Site site,
                                    Event event, const Writer& writer) {
  const int missing = A::template poll_from<Scope::system>(w, n, flag, p.call.word(), site);
  if (missing < 0) return true;
  WarpSpan<A> span(w, p.call, event, writer(missing));
  return wait_for<A>(w, p.call, n, flag, p.call.word(), site, writer, span);
}
/// wait_layer_flags() for those flags at `flags` that are in `range`, which other warps of this rank set.
template <class A>
SWITCHYARD_FN bool wait_own_flags(typename A::Warp& w, const FusedLayerParams& p, uint64_t* flags, const FlagRange& range,
                                  Site site, Event event) {
  return wait_layer_flags<A>(
      w, p, range.count, [&](int i) { return flags + range.first + i; }, site, event, [&](int) { return p.call.rank(); });
}

/// Copies this warp's share of the tokens to memory that other ranks read and announces their routes; the last warp releases
/// the flag to all ranks.
template <class A>
SWITCHYARD_FN void announce_layer(typename A::Warp& w, const FusedLayerParams& p) {
  const CallContext& call = p.call;
  const Share share = share_of_blocks(w, 0, w.num_blocks());
  for (int64_t t = share.index; t < p.tokens; t += share.step) {
    if (p.x != nullptr)
      A::copy(w, call.heap.local(p.layout.x(t)), p.x + t * p.layout.row_bytes, static_cast<size_t>(p.layout.row_bytes));
    A::for_lanes(w, p.routes.topk, [&](int k) {
      const int64_t f = t * p.routes.topk + k;
      p.layout.per_rank ? publish_route<true>(call.heap, p.layout, p.routes, f)
                        : publish_route<false>(call.heap, p.layout, p.routes, f);
    });
  }
  A::settle(w);
  if (!arrive_is_last<A>(w, &p.memory.counters->announced)) return;
  A::template publish_to<Scope::system>(
      w, call.world(),
      [&](int i) {
        return FlagStore{call.heap.at(call.in_turn(i), p.layout.announced(call.rank())), call.word()};
      },
      Site::layer_told);
}

/// Copies a row from its source to all its positions on this rank, if it is the lowest of its token's rows there. The copies
/// are pending on return. \returns the bytes that crossed a link
template <class A>
SWITCHYARD_FN uint64_t pull_row(typename A::Warp& w, const FusedLayerParams& p, int64_t row, MoveCounter& moved) {
  const CallContext& call = p.call;
  const int32_t* const places = call.heap.local(p.layout.places(row));
  if (places[0] < 0) return 0;
  const int64_t source = *call.heap.local(p.layout.source(row));
  const int rank = source_rank(source);
  const auto bytes = static_cast<size_t>(p.layout.row_bytes);
  A::multicast_to(
      w, p.layout.topk,
      [&](int i) -> void* { return places[i] >= 0 ? p.memory.x_rows + places[i] * p.layout.row_bytes : nullptr; },
      call.heap.at(rank, p.layout.x(source_token(source))), bytes);
  ++moved.payload_rows;
  const bool local = rank == call.rank();
  (local ? moved.local_bytes : moved.remote_bytes) += bytes;
  return local ? 0 : bytes;
}

/// Pulls the rows of this rank's experts that this warp claims, in ascending order. Returns false after recording a fault.
template <class A>
SWITCHYARD_FN bool pull_layer_rows(typename A::Warp& w, const FusedLayerParams& p, MoveCounter& moved) {
  const CallContext& call = p.call;
  const int64_t rows = p.tile_row[p.order.first_tiles[p.order.experts]];
  const int topk = p.layout.topk;
  const bool announced = wait_layer_flags<A>(
      w, p, call.world(), [&](int r) { return call.heap.local(p.layout.announced(r)); }, Site::layer_told, Event::wait_told,
      [](int r) { return r; });
  if (!announced) return false;
  for (;;) {
    const auto base = static_cast<int64_t>(A::take(w, &p.memory.counters->pulls, A::kTakenAtOnce));
    if (base >= rows) return true;
    const int64_t end = base + A::kTakenAtOnce < rows ? base + A::kTakenAtOnce : rows;
    WarpSpan<A> span(w, call, Event::pull_rows, end - base);
    uint64_t crossed = 0;
    for (int64_t row = base; row < end; ++row) crossed += pull_row<A>(w, p, row, moved);
    span.set_bytes(crossed);
    A::settle(w);
    A::template publish_to<Scope::device>(
        w, static_cast<int>(end - base) * topk,
        [&](int i) {
          const int32_t* const places = call.heap.local(p.layout.places(base + i / topk));
          const int32_t place = places[0] < 0 ? -1 : places[i % topk];
          return FlagStore{place < 0 ? nullptr : p.memory.arrived + place, call.word()};
        },
        Site::layer_rows);
  }
}

/// Computes the tiles of both products whose tickets this warp claims. `multiply(w, tile)` computes one tile; its pending
/// stores are settled by this function. Returns false after recording a fault.
template <class A, class Multiply>
SWITCHYARD_FN bool multiply_layer_tiles(typename A::Warp& w, const FusedLayerParams& p, const Multiply& multiply) {
  const auto tickets = static_cast<uint64_t>(count_tickets(p.order));
  for (;;) {
    const uint64_t ticket = A::take(w, &p.memory.counters->tickets, 1);
    if (ticket >= tickets) return true;
    const FusedTile tile = fused_tile_of(p, static_cast<uint32_t>(ticket));
    const bool ready = tile.down ? wait_own_flags<A>(w, p, p.memory.h_done, awaited_by_down(tile.index, p.order.up_columns),
                                                     Site::layer_tiles, Event::wait_tiles)
                                 : wait_own_flags<A>(w, p, p.memory.arrived, awaited_by_up(tile.row, tile.rows),
                                                     Site::layer_rows, Event::wait_tile_rows);
    if (!ready) return false;
    const WarpSpan<A> span(w, p.call, tile.down ? Event::expert_down : Event::expert_up, tile.rows);
    multiply(w, tile);
    A::settle(w);
    uint64_t* const flags = tile.down ? p.memory.y_done : p.memory.h_done;
    const int columns = tile.down ? p.order.down_columns : p.order.up_columns;
    A::template store_release<Scope::device>(w, flags + flag_of_tile(tile.index, columns, tile.column_tile), p.call.word(),
                                             Site::layer_tiles);
  }
}

/// Stores what row `row` returns, if anything, in the inbox of its owner. The stores are pending on return. per_route: the
/// output, unless it stays on this rank. per_rank: at the highest of a token's rows, the sum of their outputs, k ascending,
/// like the sums of a per_rank combine. \returns the bytes that crossed a link
template <class A>
SWITCHYARD_FN uint64_t return_row(typename A::Warp& w, const FusedLayerParams& p, int64_t row) {
  const HeapView& heap = p.call.heap;
  const int64_t source = *heap.local(p.layout.source(row)), row_bytes = p.layout.row_bytes;
  const int owner = source_rank(source);
  const auto crosses = static_cast<uint64_t>(owner == p.call.rank() ? 0 : row_bytes);
  std::byte* const to = heap.at(owner, p.layout.inbox(returned_row(p.layout, source)));
  if (!p.layout.per_rank) {
    if (crosses != 0) A::copy(w, to, p.memory.y + row * row_bytes, static_cast<size_t>(row_bytes));
    return crosses;
  }
  const int64_t lowest = summed_places(heap, p.layout, row);
  if (lowest < 0) return 0;
  const int32_t* const places = heap.local(p.layout.places(lowest));
  const float* const weights = heap.local(p.layout.place_weights(lowest));
  A::template reduce_rows_from<kMaxTopk>(
      w, ReduceSpec{to, nullptr, nullptr, 0, {nullptr, nullptr}, p.type, p.hidden}, p.layout.topk, true,
      [&](int i) -> const void* { return places[i] < 0 ? nullptr : p.memory.y + places[i] * row_bytes; },
      [&](int i) { return weights[i]; });
  return crosses;
}

/// Returns the outputs of the row tiles that this warp claims, and announces each returned row to its owner, which may be this
/// rank. Returns false after recording a fault.
template <class A>
SWITCHYARD_FN bool return_layer_rows(typename A::Warp& w, const FusedLayerParams& p, MoveCounter& moved) {
  const CallContext& call = p.call;
  const int tiles = p.order.first_tiles[p.order.experts];
  int complete = 0;  // number of row tiles whose flags need not be awaited again; per_rank: other rows may be in earlier tiles
  for (;;) {
    const uint64_t taken = A::take(w, &p.memory.counters->returns, 1);
    if (taken >= static_cast<uint64_t>(tiles)) return true;
    const int index = static_cast<int>(taken);
    const FusedTile tile = fused_row_tile(p, expert_of_tile(p.order.first_tiles, p.order.experts, index), index);
    const FlagRange awaited = awaited_by_return(p.layout.per_rank ? complete : index, index + 1, p.order.down_columns);
    if (!wait_own_flags<A>(w, p, p.memory.y_done, awaited, Site::layer_tiles, Event::wait_tiles)) return false;
    complete = index + 1;
    WarpSpan<A> span(w, call, Event::return_rows, tile.rows);
    uint64_t crossed = 0;
    for (int i = 0; i < tile.rows; ++i) crossed += return_row<A>(w, p, tile.row + i);
    moved.remote_bytes += crossed;
    span.set_bytes(crossed);
    A::settle(w);
    A::template publish_to<Scope::system>(
        w, tile.rows,
        [&](int i) {
          const int64_t row = tile.row + i, source = *call.heap.local(p.layout.source(row));
          const bool returns = !p.layout.per_rank || summed_places(call.heap, p.layout, row) >= 0;
          uint64_t* const flag = call.heap.at(source_rank(source), p.layout.returned(returned_row(p.layout, source)));
          return FlagStore{returns ? flag : nullptr, call.word()};
        },
        Site::layer_returned);
  }
}

/// The rows that a token's owner adds, in this order.
struct ReturnedRows {
  const FusedLayerParams& p;
  int64_t token;
  uint64_t ranks;  ///< per_rank: set of the ranks that return a row of the token

  SWITCHYARD_FN ReturnedRows(const FusedLayerParams& params, int64_t t)
      : p(params), token(t), ranks(p.layout.per_rank ? ranks_of(p.routes, t) : 0) {}
  /// i in [0, returned_rows()). False for rows of dropped or invalid routes and, per_rank, if at most i ranks return a row.
  SWITCHYARD_FN bool exists(int i) const {
    if (p.layout.per_rank) return i < bits(ranks);
    const int64_t f = token * p.layout.topk + i;
    return p.routes.ids[f] >= 0 && p.routes.route_row[f] >= 0;
  }
  SWITCHYARD_FN int rank(int i) const {
    return p.layout.per_rank ? nth_bit(ranks, i) : p.routes.map.owner(p.routes.ids[token * p.layout.topk + i]);
  }
  SWITCHYARD_FN const std::byte* at(int i) const {
    const int64_t row = token * p.layout.returned_rows() + i;
    if (!p.layout.per_rank && rank(i) == p.call.rank()) return p.memory.y + p.routes.route_row[row] * p.layout.row_bytes;
    return p.call.heap.local(p.layout.inbox(row));
  }
};

/// Sums the tokens that this warp claims in float32, like combine. per_route: weighted, k ascending; per_rank: ranks ascending.
/// Returns false after recording a fault.
template <class A>
SWITCHYARD_FN bool sum_layer_tokens(typename A::Warp& w, const FusedLayerParams& p) {
  const CallContext& call = p.call;
  const int rows_of_token = p.layout.returned_rows();
  for (;;) {
    const auto t = static_cast<int64_t>(A::take(w, &p.memory.counters->sums, 1));
    if (t >= p.tokens) break;
    const ReturnedRows rows(p, t);
    const int64_t first = t * rows_of_token;
    const uint64_t kept = A::lanes_where(w, rows_of_token, [&](int64_t i) { return rows.exists(static_cast<int>(i)); });
    const bool there = wait_layer_flags<A>(
        w, p, bits(kept), [&](int i) { return call.heap.local(p.layout.returned(first + nth_bit(kept, i))); },
        Site::layer_returned, Event::wait_returned, [&](int i) { return rows.rank(nth_bit(kept, i)); });
    if (!there) return false;
    const WarpSpan<A> span(w, call, Event::sum_returned, bits(kept));
    std::byte* const out = p.out + t * p.layout.row_bytes;
    A::template reduce_rows_from<kMaxTopk>(
        w, ReduceSpec{out, nullptr, nullptr, 0, {p.add ? out : nullptr, nullptr}, p.type, p.hidden}, rows_of_token,
        p.weights != nullptr, [&](int i) -> const void* { return rows.exists(i) ? rows.at(i) : nullptr; },
        [&](int i) { return p.weights[first + i]; });
  }
  A::settle(w);
  return true;
}

/// Kernel body; runs after the plan or, for the second half alone, after a call of the first half. `multiply(w, tile)`: see
/// multiply_layer_tiles. Returns false after recording a fault.
template <class A, class Multiply>
SWITCHYARD_FN bool fused_layer(typename A::Warp& w, const FusedLayerParams& p, const Multiply& multiply) {
  MoveCounter moved;
  if (p.parts.up) announce_layer<A>(w, p);
  bool done = !p.parts.up || pull_layer_rows<A>(w, p, moved);
  done = done && multiply_layer_tiles<A>(w, p, multiply);
  if (p.parts.down) done = done && return_layer_rows<A>(w, p, moved) && sum_layer_tokens<A>(w, p);
  p.call.moved[w.index()] = moved;
  FusedCounters* const counters = p.memory.counters;
  if (arrive_is_last<A>(w, &counters->exits))
    A::for_lanes(w, 1, [&](int) { counters->pulls = counters->tickets = counters->returns = counters->sums = 0; });
  return done;
}

}  // namespace switchyard::detail

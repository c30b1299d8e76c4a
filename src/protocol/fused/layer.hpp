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
// Progress: announcements do not wait, and pulls wait only for `layer_told`. A warp claims tickets only after all rows have
// been claimed, so every row that an up tile waits for is held by a warp that is not waiting. A down tile waits for up tiles
// with lower tickets (tickets.hpp), a return waits for tiles, and a sum waits for returns from all ranks; nothing waits for
// sums. A rank may therefore have any number of warps, even one, but all of them must eventually run, because each announces
// its share of the tokens.
//
// Buffers: every call follows a plan, in which each rank signals to all other ranks that its previous call has ended. `source`,
// `places` and the inbox at another rank may therefore be written immediately. When this rank's previous call has ended, other
// ranks have finished reading its layout.x(), because it has received the outputs of all its rows. A call of the first half
// alone must therefore be followed by one of the second half, which has no separate plan.
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
  const float* weights = nullptr;     ///< [T, K], or null: all 1
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
    A::for_lanes(w, p.routes.topk, [&](int k) { publish_route(call.heap, p.layout, p.routes, t * p.routes.topk + k); });
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

/// Returns the outputs of the row tiles that this warp claims. Outputs for other owners are copied to the owner's inbox, and
/// each output is announced to its owner, which may be this rank. Returns false after recording a fault.
template <class A>
SWITCHYARD_FN bool return_layer_rows(typename A::Warp& w, const FusedLayerParams& p, MoveCounter& moved) {
  const CallContext& call = p.call;
  const int64_t row_bytes = p.layout.row_bytes;
  const int tiles = p.order.first_tiles[p.order.experts];
  for (;;) {
    const uint64_t taken = A::take(w, &p.memory.counters->returns, 1);
    if (taken >= static_cast<uint64_t>(tiles)) return true;
    const int index = static_cast<int>(taken);
    const FusedTile tile = fused_row_tile(p, expert_of_tile(p.order.first_tiles, p.order.experts, index), index);
    if (!wait_own_flags<A>(w, p, p.memory.y_done, awaited_by_return(index, p.order.down_columns), Site::layer_tiles,
                           Event::wait_tiles))
      return false;
    WarpSpan<A> span(w, call, Event::return_rows, tile.rows);
    uint64_t crossed = 0;
    const auto source_of = [&](int i) { return *call.heap.local(p.layout.source(tile.row + i)); };
    const auto route_of = [&](int64_t source) { return source_token(source) * p.layout.topk + source_k(source); };
    for (int i = 0; i < tile.rows; ++i) {
      const int64_t source = source_of(i);
      const int owner = source_rank(source);
      if (owner == call.rank()) continue;
      A::copy(w, call.heap.at(owner, p.layout.inbox(route_of(source))), p.memory.y + (tile.row + i) * row_bytes,
              static_cast<size_t>(row_bytes));
      crossed += static_cast<uint64_t>(row_bytes);
    }
    moved.remote_bytes += crossed;
    span.set_bytes(crossed);
    A::settle(w);
    A::template publish_to<Scope::system>(
        w, tile.rows,
        [&](int i) {
          const int64_t source = source_of(i);
          return FlagStore{call.heap.at(source_rank(source), p.layout.returned(route_of(source))), call.word()};
        },
        Site::layer_returned);
  }
}

/// Sums the tokens that this warp claims, like a per_route combine: k ascending, in float32. Returns false after recording a
/// fault.
template <class A>
SWITCHYARD_FN bool sum_layer_tokens(typename A::Warp& w, const FusedLayerParams& p) {
  const CallContext& call = p.call;
  const int topk = p.layout.topk;
  const int64_t row_bytes = p.layout.row_bytes;
  for (;;) {
    const auto t = static_cast<int64_t>(A::take(w, &p.memory.counters->sums, 1));
    if (t >= p.tokens) break;
    const int64_t first = t * topk;
    const auto row_at = [&](int k) { return p.routes.ids[first + k] >= 0 ? p.routes.route_row[first + k] : -1; };
    const auto rank_of = [&](int k) { return p.routes.map.owner(p.routes.ids[first + k]); };
    const uint64_t kept = A::lanes_where(w, topk, [&](int64_t k) { return row_at(static_cast<int>(k)) >= 0; });
    const bool there = wait_layer_flags<A>(
        w, p, bits(kept), [&](int i) { return call.heap.local(p.layout.returned(first + nth_bit(kept, i))); },
        Site::layer_returned, Event::wait_returned, [&](int i) { return rank_of(nth_bit(kept, i)); });
    if (!there) return false;
    const WarpSpan<A> span(w, call, Event::sum_returned, bits(kept));
    std::byte* const out = p.out + t * row_bytes;
    A::template reduce_rows_from<kMaxTopk>(
        w, ReduceSpec{out, nullptr, nullptr, 0, {p.add ? out : nullptr, nullptr}, p.type, p.hidden}, topk, p.weights != nullptr,
        [&](int k) -> const void* {
          const int32_t row = row_at(k);
          if (row < 0) return nullptr;
          return rank_of(k) == call.rank() ? p.memory.y + row * row_bytes : call.heap.local(p.layout.inbox(first + k));
        },
        [&](int k) { return p.weights[first + k]; });
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

// SPDX-License-Identifier: Apache-2.0
// Low-latency combine: rows, or a rank's sums of rows, are pushed to a slot of their token at its owner, which sums them as
// they arrive.
//
// | word     | written by                 | read by       | order | scope  | reuse                                        |
// | returned | a warp of an expert's rank | owner's warps | none  | system | zero again when read; two sets by parity     |
//
// No flag follows a row, because it is a sentinel row (arch/ops.hpp): each of its words is a `returned` word.
//
// Slots are indexed by (token, first k with the expert) for per_route and by (token, rank) for per_rank. A slot is read only in
// the call in which it was written. Progress: all warps send before they wait, and they wait only for remote sends.
#pragma once

#include "protocol/low_latency/call.hpp"

namespace switchyard::detail {

/// Trivially copyable. Pointers refer to this rank's private memory.
struct LowLatencyCombineParams {
  CallContext call;
  LowLatencyLayout layout;
  CombineOrder order = CombineOrder::per_route;
  DType type = DType::bf16;
  int64_t row_bytes = 0;  ///< of y and out

  // Expert side: returned data.
  const std::byte* y = nullptr;
  const int32_t* rows_of_expert = nullptr;
  const int64_t* row_source = nullptr;
  const LowLatencyRoute* routes = nullptr;
  const int64_t* source_tokens = nullptr;  ///< [W]

  const float* expert_scale = nullptr;  ///< per_route: [experts here] or null: rows are returned as round(y * scale)

  // Owner side: returned data.
  const OwnDispatch* own = nullptr;  ///< [1]
  uint64_t combined = 0;             ///< own->call, read when the call runs: it differs between replays of a graph
  const int32_t* own_ids = nullptr;
  const float* weights = nullptr;  ///< per_route: [T * K] or null: all 1

  std::byte* out = nullptr;

  /// Includes the number of the dispatch, which is compared like the kind. Ranks combining outputs of different dispatches
  /// would wait for rows that never arrive, or leave rows in slots that later calls would mistake for their own.
  SWITCHYARD_FN uint64_t header() const { return header_value(combine_kind(order, type), combined); }
};

/// The number of bytes for `owner` that cross a link: `bytes`, or 0 if the owner is this rank.
template <class P>
SWITCHYARD_FN uint64_t remote_part(const P& p, int owner, int64_t bytes) {
  return owner == p.call.rank() ? 0 : static_cast<uint64_t>(bytes);
}

template <class P>
SWITCHYARD_FN void add_moved(const P& p, int owner, int piece, int64_t bytes, MoveCounter& moved) {
  (owner == p.call.rank() ? moved.local_bytes : moved.remote_bytes) += static_cast<uint64_t>(bytes);
  if (piece == 0) ++moved.payload_rows;
}

/// Destination of a returned row: a slot of token t in its owner's memory or, if the owner is on another host, in the memory of
/// its proxy on this host (hosts/low_latency_returns.hpp).
template <class P>
SWITCHYARD_FN std::byte* return_slot(const P& p, int owner, int t, int slot) {
  if constexpr (requires { p.remote; })
    if (p.call.heap.base[owner] == nullptr) return p.remote.row(p.call.epoch, owner, t, slot);
  return p.call.heap.at(owner, p.layout.return_row(p.call.epoch, t, slot));
}

/// Sends a piece of an output row of local expert `expert`, at `from`, to slot k of token t. The stores are pending on return.
template <class A, class P>
SWITCHYARD_FN void return_piece(typename A::Warp& w, const P& p, int owner, int t, int k, int piece, const std::byte* from,
                                int expert) {
  const auto& l = p.layout;
  const int at = static_cast<int>(dtype_bytes(p.type, l.column(piece))), columns = l.column(piece + 1) - l.column(piece),
            bytes = static_cast<int>(dtype_bytes(p.type, columns));
  std::byte* to = return_slot(p, owner, t, k) + at;
  if (p.expert_scale != nullptr) {
    const ReduceSpec scaled{to, nullptr, nullptr, 0, {nullptr, nullptr}, p.type, columns, true};
    A::template reduce_rows_from<1>(
        w, scaled, 1, true, [&](int) -> const void* { return from; }, [&](int) { return p.expert_scale[expert]; });
  } else {
    A::multicast_sentinel(
        w, 1, [to](int) -> void* { return to; }, from, static_cast<size_t>(bytes));
  }
}

/// per_route: returns every row that dispatch delivered.
template <class A, class P>
SWITCHYARD_FN void return_rows(typename A::Warp& w, const P& p, MoveCounter& moved) {
  const auto& l = p.layout;
  const int experts = l.experts_of(p.call.rank());
  for (int64_t i = spread_index(w);; i += w.total()) {
    const Located found =
        A::locate_many(w, i, experts, [&](int e) { return static_cast<int64_t>(p.rows_of_expert[e]) * l.pieces; });
    if (found.segment == experts) break;
    WarpSpan<A> span(w, p.call, Event::return_rows, 1);
    const auto [r, piece] = split_index(found.offset, l);
    const int64_t row = found.segment * l.rows_per_expert() + r;
    const int at = static_cast<int>(dtype_bytes(p.type, l.column(piece))),
              bytes = static_cast<int>(dtype_bytes(p.type, l.column(piece + 1))) - at;
    A::prefetch(w, p.y + row * p.row_bytes + at, static_cast<size_t>(bytes));
    const int64_t from = p.row_source[row];
    const int owner = static_cast<int>(from >> 48), k = static_cast<int>(from >> 32 & 0xffff);
    const auto t = static_cast<int>(from & 0xffffffff);
    return_piece<A>(w, p, owner, t, k, piece, p.y + row * p.row_bytes + at, found.segment);
    add_moved(p, owner, piece, bytes, moved);
    span.set_bytes(remote_part(p, owner, bytes));
  }
}

/// per_rank: sums the local rows of each token and returns one row.
template <class A, class P>
SWITCHYARD_FN void return_sums(typename A::Warp& w, const P& p, MoveCounter& moved) {
  const auto& l = p.layout;
  const int world = p.call.world();
  for (int64_t i = spread_index(w);; i += w.total()) {
    const Located found = A::locate(w, i, world, [&](int s) { return p.source_tokens[s] * l.pieces; });
    if (found.segment == world) break;
    const int owner = found.segment;
    const ItemPiece row = split_index(found.offset, l);
    const int t = static_cast<int>(row.item), piece = row.piece;
    const LowLatencyRoute* routes = p.routes + int64_t{owner * l.max_tokens + t} * l.topk;
    if (A::lanes_where(w, l.topk, [&](int64_t k) { return routes[k].row >= 0; }) == 0) continue;
    WarpSpan<A> span(w, p.call, Event::return_rows, 1);
    const int at = static_cast<int>(dtype_bytes(p.type, l.column(piece))),
              bytes = static_cast<int>(dtype_bytes(p.type, l.column(piece + 1))) - at;
    std::byte* to = return_slot(p, owner, t, p.call.rank()) + at;
    const ReduceSpec sum{to, nullptr, nullptr, 0, {nullptr, nullptr}, p.type, l.column(piece + 1) - l.column(piece), true};
    A::template reduce_rows_from<kMaxTopk>(
        w, sum, l.topk, true,
        [&](int k) -> const void* { return routes[k].row >= 0 ? p.y + routes[k].row * p.row_bytes + at : nullptr; },
        [&](int k) { return routes[k].weight; });
    add_moved(p, owner, piece, bytes, moved);
    span.set_bytes(remote_part(p, owner, bytes));
  }
}

/// Sending half; does not wait.
template <class A, class P>
SWITCHYARD_FN void low_latency_return(typename A::Warp& w, const P& p) {
  enter_call<A>(w, p.call, p.layout, p.header());
  MoveCounter moved;
  if (p.order == CombineOrder::per_route)
    return_rows<A>(w, p, moved);
  else
    return_sums<A>(w, p, moved);
  p.call.moved[w.index()] = moved;
}

/// Sums `places` returned rows like reduce_if_arrived; row_of(i) is returned by rank writer(i). Returns false after recording a
/// fault.
template <class A, class P, class Row, class Weight, class Writer>
SWITCHYARD_FN bool sum_returned(typename A::Warp& w, const P& p, const ReduceSpec& sum, int places, bool weighted, Row&& row_of,
                                Weight&& weight_of, Writer&& writer) {
  constexpr int kLooks = 16;
  WarpSpan<A> span(w, p.call, Event::sum_returned, 1);
  WaitClock<A> clock;
  for (int looks = 0;; looks = kLooks) {
    const uint64_t begin = span.mark();
    const int missing = A::reduce_if_arrived(w, sum, places, weighted, row_of, weight_of, looks);
    if (looks > 0 && (missing < 0 || writer(missing) != clock.awaited()))
      clock.charge(w, p.call, missing < 0 ? clock.awaited() : writer(missing));
    if (missing < 0) {
      if (looks > 0) span.next(Event::sum_returned, 1, begin);
      return true;
    }
    if (looks == 0) clock.begin(writer(missing));
    span.set_event(Event::wait_returned, clock.awaited());
    const uint64_t* entered = p.call.heap.local(p.layout.header(p.call.epoch, clock.awaited()));  // no word is more specific
    if (!clock.keep_waiting(w, p.call, Site::returned, entered, p.call.word())) return false;
  }
}

/// Address of the row returned for slot `slot` of token t: the slot itself or, for a row from another host, the address at
/// which a round delivered it (hosts/low_latency_phases.hpp).
template <class P, class Ids>
SWITCHYARD_FN const std::byte* returned_row(const P& p, const Ids& all_ids, int t, int slot) {
  if constexpr (requires { p.rails; })
    if (const std::byte* const row = row_in_round(p, all_ids, t, slot)) return row;
  return p.call.heap.local(p.layout.return_row(p.call.epoch, t, slot));
}

/// Sums columns [column, column + columns) of token t. `all_ids(f)` is the expert of route f, or -1.
template <class A, class P, class Ids>
SWITCHYARD_FN bool sum_columns(typename A::Warp& w, const P& p, const Ids& all_ids, int t, int column, int columns) {
  const auto& l = p.layout;
  const auto id = [&](int k) { return all_ids(t * l.topk + k); };
  const bool per_rank = p.order == CombineOrder::per_rank;
  if (!per_rank && p.weights != nullptr) A::prefetch(w, p.weights + t * l.topk, static_cast<size_t>(l.topk) * 4);
  const int at = static_cast<int>(dtype_bytes(p.type, column));
  const ReduceSpec sum{p.out + int64_t{t} * p.row_bytes + at, nullptr, nullptr, 0, {nullptr, nullptr}, p.type, columns};
  const auto slot = [&](int s) -> const void* { return returned_row(p, all_ids, t, s) + at; };
  if (per_rank) {
    const uint64_t ranks =
        A::lanes_union(w, l.topk, [&](int k) { return id(k) >= 0 ? uint64_t{1} << l.owner(id(k)) : uint64_t{0}; });
    return sum_returned<A>(
        w, p, sum, p.call.world(), false, [&](int r) -> const void* { return ranks >> r & 1 ? slot(r) : nullptr; },
        [](int) { return 1.0f; }, [](int r) { return r; });
  }
  /// The token's first choice of the same expert, whose slot contains the row.
  const auto first = [&](int k) {
    int j = 0;
    SWITCHYARD_ROLLED
    while (id(j) != id(k)) ++j;
    return j;
  };
  return sum_returned<A>(
      w, p, sum, l.topk, true, [&](int k) -> const void* { return id(k) >= 0 ? slot(first(k)) : nullptr; },
      [&](int k) { return p.weights != nullptr ? p.weights[t * l.topk + k] : 1.0f; }, [&](int k) { return l.owner(id(k)); });
}

/// Parts of a piece that are summed separately, so that a few tokens keep many warps busy.
struct SumParts {
  static constexpr int kMinColumns = 256;
  int columns;
  uint32_t count;  ///< number per piece; the last ones may be empty
};
template <class Warp, class P>
SWITCHYARD_FN SumParts sum_parts(const Warp& w, const P& p, int tokens) {
  const auto pieces = static_cast<uint32_t>(tokens) * static_cast<uint32_t>(p.layout.pieces);
  const uint32_t warps_per_piece = pieces > 0 ? static_cast<uint32_t>(w.total()) / pieces : 1;
  const auto whole = static_cast<uint32_t>(p.layout.piece_columns), max = whole / static_cast<uint32_t>(SumParts::kMinColumns);
  const uint32_t wanted = warps_per_piece < max ? warps_per_piece : max;
  if (wanted <= 1) return {p.layout.piece_columns, 1};
  const uint32_t columns = (whole / wanted + 127) / 128 * 128;
  return {static_cast<int>(columns), (whole + columns - 1) / columns};
}

/// Sums this warp's share of the tokens' pieces. Returns false after recording a fault.
template <class A, class P, class Ids>
SWITCHYARD_FN bool sum_pieces(typename A::Warp& w, const P& p, const Ids& ids, int tokens) {
  const auto& l = p.layout;
  const SumParts parts = sum_parts(w, p, tokens);
  const auto pieces = static_cast<uint32_t>(tokens) * static_cast<uint32_t>(l.pieces);
  for (int64_t i = receiving_index(w);; i += w.total()) {
    const uint32_t index = static_cast<uint32_t>(i), whole = index / parts.count;
    if (whole >= pieces) break;
    const ItemPiece at = split_index(whole, l);
    const int column = l.column(at.piece) + static_cast<int>(index - whole * parts.count) * parts.columns;
    const int end = l.column(at.piece + 1), columns = column + parts.columns < end ? parts.columns : end - column;
    if (columns > 0 && !sum_columns<A>(w, p, ids, static_cast<int>(at.item), column, columns)) return false;
  }
  A::settle(w);
  return true;
}

/// Receiving half. Returns false after recording a fault.
template <class A, class P>
SWITCHYARD_FN bool low_latency_sum(typename A::Warp& w, const P& p) {
  const auto tokens = static_cast<int>(p.own->tokens);
  if (!wait_entered<A>(w, p.call, p.layout, p.header(), 0)) return false;
  return sum_pieces<A>(
      w, p, [&](int f) { return p.own_ids[f]; }, tokens);
}

}  // namespace switchyard::detail

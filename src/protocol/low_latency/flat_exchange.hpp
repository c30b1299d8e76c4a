// SPDX-License-Identifier: Apache-2.0
// The entire exchange in a single launch: rows are sent once per (token, rank), each expert's result is returned to its token
// as soon as the row has arrived, and tokens are summed as results arrive. Rows are not packed per expert, so no counts are
// exchanged.
//
// Flags: call_header, message and sentinel rows, as in low-latency dispatch and combine, all in a single call. Buffers:
// messages and returned rows of one set; see low_latency/call.hpp. Progress: all warps send before they wait, and answer remote
// sends before they wait for answers. Answers therefore wait only for sends, and sums only for answers.
#pragma once

#include <type_traits>

#include "protocol/low_latency/combine.hpp"
#include "protocol/low_latency/messages.hpp"
#include "switchyard/row_function.hpp"

namespace switchyard::detail {

/// Trivially copyable. `d` and `c` have the same call and layout.
struct FlatParams {
  LowLatencyDispatchParams d;  ///< parameters of sending; the other members are unused
  LowLatencyCombineParams c;   ///< used: weights, expert_scale, out, type
};

/// Header value for a flat exchange.
template <class P>
SWITCHYARD_FN uint64_t flat_header(const P& p) {
  return header_value(low_latency_kind(LowLatencyKind::all_to_all, p.d.selects ? 1 : 0, p.c.type),
                      sent_detail(p.d.map_version, p.d.tokens));
}

/// An expert's result if the caller passes no function: the row itself, or the row times the expert's scale.
struct ScaledRows {};

/// A message, and which of its entries are for experts of this rank.
struct Message {
  const std::byte* payload;
  const LowLatencyEntry* entries;
  uint64_t mine;  ///< bit j: entry j is for an expert on this rank
};
template <class A, class Layout>
SWITCHYARD_FN Message message_from(typename A::Warp& w, const CallContext& call, const Layout& l, int source, int unit) {
  Message m;
  m.payload = call.heap.local(l.message(call.epoch, source, unit));
  m.entries = reinterpret_cast<const LowLatencyEntry*>(m.payload + l.entries_at());
  const int first = l.first_expert(call.rank()), last = first + l.experts_of(call.rank());
  m.mine = A::lanes_where(w, l.entries, [&](int64_t j) { return m.entries[j].expert >= first && m.entries[j].expert < last; });
  return m;
}

/// Sends the results of a piece to the token's owner, for the entries of the message that satisfy `answered`. The stores are
/// pending on return.
template <class A, class P, class Answered>
SWITCHYARD_FN void scale_answers(typename A::Warp& w, const P& p, const Message& m, int source, int t, int piece,
                                 const ColumnRange& range, Answered&& answered) {
  const auto& l = p.d.layout;
  const CallContext& call = p.d.call;
  const std::byte* from = m.payload + range.payload_at;
  if (p.c.expert_scale == nullptr) {
    A::multicast_sentinel(
        w, l.entries,
        [&](int j) -> void* {
          return answered(j) ? call.heap.at(source, l.return_row(call.epoch, t, m.entries[j].k)) + range.payload_at : nullptr;
        },
        from, static_cast<size_t>(range.payload_bytes));
    return;
  }
  for (int j = 0; j < l.entries; ++j)
    if (answered(j))
      return_piece<A>(w, p.c, source, t, m.entries[j].k, piece, from, m.entries[j].expert - l.first_expert(call.rank()));
}

/// Computes answers with the caller's function: make(x, n, row, column) transforms x[0 .. n), the elements of `row` starting at
/// `column`, in place.
template <class A, class P, class Make, class Answered>
SWITCHYARD_FN void make_answers(typename A::Warp& w, const P& p, const Make& make, const Message& m, int source, int t,
                                const ColumnRange& range, Answered&& answered) {
  const auto& l = p.d.layout;
  const CallContext& call = p.d.call;
  SWITCHYARD_ROLLED
  for (int j = 0; j < l.entries; ++j) {
    if (!answered(j)) continue;
    const RowOrigin row{m.entries[j].expert, source, t, m.entries[j].k};
    A::map_row(
        w, call.heap.at(source, l.return_row(call.epoch, t, row.k)) + range.payload_at, m.payload + range.payload_at, p.c.type,
        range.columns, [&](float* x, int64_t at, auto n) { make(x, n, row, range.column + at); }, true);
  }
}

/// For one piece of an arrived message, returns the results of all local experts.
template <class A, class P, class Make>
SWITCHYARD_FN bool answer_piece(typename A::Warp& w, const P& p, const Make& make, int source, int unit, int piece,
                                LastWait<A>& last, MoveCounter& moved) {
  const auto& l = p.d.layout;
  const CallContext& call = p.d.call;
  bool here = false;
  if (!wait_message<A>(w, call, l, source, unit, here, last)) return false;
  if (!here) return true;
  WarpSpan<A> span(w, call, Event::return_rows, 1);
  const Message m = message_from<A>(w, call, l, source, unit);
  const int t = l.token_of(unit);
  const ColumnRange range = piece_range(p.d, piece);
  const auto answered = [&](int j) { return (m.mine >> j & 1) != 0 && !m.entries[j].alias(); };
  if constexpr (std::is_same_v<Make, ScaledRows>)
    scale_answers<A>(w, p, m, source, t, piece, range, answered);
  else
    make_answers<A>(w, p, make, m, source, t, range, answered);
  const auto answers = static_cast<uint64_t>(bits(A::lanes_where(w, l.entries, answered)));
  const uint64_t bytes = answers * static_cast<uint64_t>(range.payload_bytes);
  (source == call.rank() ? moved.local_bytes : moved.remote_bytes) += bytes;
  if (source != call.rank()) span.set_bytes(bytes);
  if (piece == 0) moved.payload_rows += answers;
  return true;
}

/// `make` is ScaledRows or a function as described at make_answers. Returns false after recording a fault.
template <class A, class P, class Make>
SWITCHYARD_FN bool flat_exchange(typename A::Warp& w, const P& p, const Make& make) {
  const CallContext& call = p.d.call;
  MoveCounter moved;
  enter_call<A>(w, call, p.d.layout, flat_header(p));
  send_messages<A>(w, p.d, moved);
  if (!wait_entered<A>(w, call, p.d.layout, flat_header(p), kHeaderTokenBits)) return false;
  LastWait<A> last;
  const bool answered = for_each_message<A>(w, call, p.d.layout, [&](int source, int unit, int piece) {
    return answer_piece<A>(w, p, make, source, unit, piece, last, moved);
  });
  if (!answered) return false;
  last.account(w, call);
  call.moved[w.index()] = moved;
  return sum_pieces<A>(w, p.c, p.d.ids, p.d.tokens);
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Messages of low-latency mode. A message contains a row, its scales and the data for placing it at the receiver, in a slot
// determined by (source, unit).
//
// | flag         | written by        | read by            | order           | scope  | reuse                                 |
// | message      | a source's block  | receiver's warps   | release/acquire | system | epoch; two sets by parity of the call |
//
// A message's row is sent by `parts` warps of a block, each sending some of the columns, and its entries are sent by another
// warp. After a block barrier, one of these warps announces the message, so that each message costs one fence. The receiver
// processes a message in pieces, with warps on different multiprocessors. A message of a set is read only in the call in which
// it was written, so it may be overwritten two calls later (low_latency/call.hpp). Sending does not wait.
#pragma once

#include "protocol/low_latency/call.hpp"

namespace switchyard::detail {

/// Trivially copyable. Pointers refer to this rank's private memory.
struct LowLatencyDispatchParams {
  CallContext call;
  LowLatencyLayout layout;

  // Sent data.
  const std::byte* x = nullptr;       ///< [T] rows of src_row_bytes
  const std::byte* scales = nullptr;  ///< [T] rows of src_scale_bytes, for fp8 rows
  int tokens = 0;
  int src_row_bytes = 0;
  int src_scale_bytes = 0;
  DType src_type = DType::bf16;
  ScaleKind quantize = ScaleKind::none;
  int scale_group = kScaleGroup;
  int scale_element_bytes = 4;
  bool with_places = true;   ///< messages contain the places of their rows; false: only the experts
  bool selects = false;      ///< the call has a SlotSelector; compared by all ranks, as is the version of its map
  uint32_t map_version = 0;  ///< sending half of a call that selects: SlotTable::version()
  IdReader ids;
  TokenSets sets;                  ///< for those ids, or none
  const float* weights = nullptr;  ///< [T * K] or null: all 1
  int parts = 1;                   ///< warps that send a message together, at most those of a block; 1: no block barrier needed
  int part_columns = 0;            ///< columns of each part, a multiple of the scale group
  int teams = 1;                   ///< messages that a block sends at a time; see Sender

  // Stored by the owner for combine.
  int32_t* own_ids = nullptr;    ///< [max_tokens * K], -1: no expert
  float* own_weights = nullptr;  ///< [max_tokens * K]
  OwnDispatch* own = nullptr;    ///< [1]

  // Received data.
  std::byte* rows = nullptr;
  std::byte* out_scales = nullptr;
  ScalePlace scale_place;
  int32_t* rows_of_expert = nullptr;
  int64_t* source_range = nullptr;
  int64_t* row_source = nullptr;
  LowLatencyRoute* routes = nullptr;
  int64_t* source_tokens = nullptr;  ///< [W]
};

/// T of a call with at most `bound` tokens: the current value of `stated`, or `bound` if it is null.
SWITCHYARD_FN inline int tokens_now(int bound, const int32_t* stated) {
  if (stated == nullptr) return bound;
  const int tokens = *stated;
  return tokens < 0 ? 0 : tokens < bound ? tokens : bound;
}

/// A range of a row's columns, and its place in a message.
struct ColumnRange {
  int column, columns, payload_at, payload_bytes, scale_at, scale_bytes;
};
/// The `index`-th range of `width` columns, where `width` is a multiple of the scale group; empty past the end of the row.
template <class P>
SWITCHYARD_FN ColumnRange column_range(const P& p, int index, int width) {
  const auto& l = p.layout;
  ColumnRange range;
  const int begin = index * width, end = begin + width;
  range.column = begin < l.hidden ? begin : l.hidden;
  range.columns = (end < l.hidden ? end : l.hidden) - range.column;
  const DType sent = p.quantize != ScaleKind::none ? DType::fp8_e4m3 : p.src_type;
  range.payload_at = static_cast<int>(dtype_bytes(sent, range.column));
  range.payload_bytes = static_cast<int>(dtype_bytes(sent, range.columns));
  const int per_group = l.scale_bytes > 0 ? p.scale_element_bytes : 0;
  const int bits_of_group = p.scale_group == 128 ? 7 : p.scale_group == 64 ? 6 : 5;
  const auto groups = [&](int columns) { return (columns + p.scale_group - 1) >> bits_of_group; };
  range.scale_at = groups(range.column) * per_group;
  range.scale_bytes = groups(range.columns) * per_group;
  return range;
}
template <class P>
SWITCHYARD_FN ColumnRange piece_range(const P& p, int piece) {
  return column_range(p, piece, p.layout.piece_columns);
}

/// Number of tokens, among the first `tokens`, that choose the expert; each token counts once.
template <class A, class P>
SWITCHYARD_FN int32_t tokens_choosing(typename A::Warp& w, const P& p, int tokens, int32_t expert) {
  if (p.sets.ready()) return p.sets.count(expert, tokens);
  const int topk = p.layout.topk;
  return static_cast<int32_t>(A::count_where(w, tokens, [&](int64_t t) {
    bool chosen = false;
    SWITCHYARD_UNROLLED_BY_4
    for (int k = 0; k < topk; ++k) chosen |= p.ids(t * topk + k) == expert;
    return chosen;
  }));
}

/// Bit mask of the ranks with one of the unit's experts.
template <class A, class P>
SWITCHYARD_FN uint64_t ranks_of(typename A::Warp& w, const P& p, int unit) {
  const auto& l = p.layout;
  const int f = l.token_of(unit) * l.topk + l.first_k_of(unit);
  return A::lanes_union(w, l.entries, [&](int j) {
    const int32_t expert = p.ids(f + j);
    return expert >= 0 ? uint64_t{1} << l.owner(expert) : 0;
  });
}

/// The message entry for choice k of a token whose choices start at `begin`. `place(expert)` is the number of earlier tokens
/// that choose the expert.
template <class P, class Place>
SWITCHYARD_FN LowLatencyEntry make_entry(const P& p, int begin, int k, const Place& place) {
  const int32_t expert = p.ids(begin + k);
  LowLatencyEntry entry{expert, 0, p.weights ? p.weights[begin + k] : 1.0f, k};
  if (expert >= 0) {
    SWITCHYARD_UNROLLED_BY_4
    for (int g = k - 1; g >= 0; --g)
      if (p.ids(begin + g) == expert) entry.k = g;
    if (p.with_places) entry.index = place(expert);
    if (entry.k != k) entry.index |= LowLatencyEntry::kAlias;
  }
  return entry;
}

/// Writes the entries of a message to all its destination ranks; the receivers use them to place the token's routes. Settled on
/// return.
template <class A, class P>
SWITCHYARD_FN void send_entries(typename A::Warp& w, const P& p, int unit) {
  const auto& l = p.layout;
  const uint64_t places = ranks_of<A>(w, p, unit);
  if (places == 0) return;
  const int t = l.token_of(unit), begin = t * l.topk, first_k = l.first_k_of(unit);
  auto* const counted = reinterpret_cast<int32_t*>(w.scratch());
  if (p.with_places && !p.sets.ready()) {
    for (int j = 0; j < l.entries; ++j) {
      const int32_t expert = p.ids(begin + first_k + j);
      const int32_t n = expert >= 0 ? tokens_choosing<A>(w, p, t, expert) : 0;
      A::for_lanes(w, 1, [&](int) { counted[j] = n; });
    }
    A::settle(w);
  }
  A::for_lanes(w, l.entries, [&](int j) {
    const LowLatencyEntry entry = make_entry(
        p, begin, first_k + j, [&](int32_t expert) { return p.sets.ready() ? p.sets.count(expert, t) : counted[j]; });
    SWITCHYARD_ROLLED
    for (int i = 0; i < p.call.world(); ++i) {
      const int r = p.call.in_turn(i);
      if ((places >> r & 1) == 0 || !is_mapped<A>(p.call.heap, r)) continue;
      std::byte* message = p.call.heap.at(r, l.message(p.call.epoch, p.call.rank(), unit));
      reinterpret_cast<LowLatencyEntry*>(message + l.entries_at())[j] = entry;
    }
  });
  A::settle(w);
}

/// False for a separately sent route that repeats an earlier expert of its token; the message of such a route has no row.
template <class P>
SWITCHYARD_FN bool carries_row(const P& p, int unit) {
  const auto& l = p.layout;
  if (l.units_per_token() == 1) return true;
  const int begin = l.token_of(unit) * l.topk;
  const int k = l.first_k_of(unit);
  bool repeats = false;
  for (int g = 0; g < k; ++g) repeats |= p.ids(begin + g) == p.ids(begin + k);
  return !repeats;
}

/// Counts the payload for the ranks in `places`, including ranks on other hosts, which receive it by another path.
template <class P>
SWITCHYARD_FN void count_payload(const P& p, const ColumnRange& range, int part, uint64_t places, MoveCounter& moved) {
  const int part_bytes = range.payload_bytes + range.scale_bytes;
  const auto bytes = static_cast<uint64_t>(part_bytes);
  const uint64_t own = places >> p.call.rank() & 1;
  moved.local_bytes += bytes * own;
  moved.remote_bytes += bytes * (static_cast<uint64_t>(bits(places)) - own);
  if (part == 0) moved.payload_rows += static_cast<uint64_t>(bits(places));
}

/// Sends some columns of the payload to the ranks in `places`.
template <class A, class P>
SWITCHYARD_FN void send_payload(typename A::Warp& w, const P& p, int unit, int t, int part, uint64_t places,
                                MoveCounter& moved) {
  const auto& l = p.layout;
  const ColumnRange range = column_range(p, part, p.part_columns);
  if (range.columns == 0) return;
  const uint64_t here = mapped_of<A>(p.call.heap, places);
  if constexpr (requires { A::kSpansHosts; })
    if (here == 0) return count_payload(p, range, part, places, moved);
  const std::byte* row = p.x + int64_t{t} * p.src_row_bytes;
  const auto message = [&](int i) {
    const int r = p.call.in_turn(i);
    return (here >> r & 1) ? p.call.heap.at(r, l.message(p.call.epoch, p.call.rank(), unit)) : nullptr;
  };
  if (p.quantize != ScaleKind::none) {
    A::quantize_to(
        w, p.call.world(),
        [&](int r) -> QuantizedRow {
          std::byte* at = message(r);
          if (at == nullptr) return {nullptr, nullptr};
          return {reinterpret_cast<uint8_t*>(at + range.payload_at), at + l.scales_at() + range.scale_at};
        },
        row + dtype_bytes(p.src_type, range.column), p.src_type, range.columns, p.quantize, p.scale_group);
  } else {
    A::multicast_to(
        w, p.call.world(),
        [&](int r) -> void* {
          std::byte* at = message(r);
          return at ? at + range.payload_at : nullptr;
        },
        row + range.payload_at, static_cast<size_t>(range.payload_bytes));
    if (p.scales != nullptr)
      A::multicast_fetched(
          w, p.call.world(),
          [&](int r) -> void* {
            std::byte* at = message(r);
            return at ? at + l.scales_at() + range.scale_at : nullptr;
          },
          A::fetch_words(w, p.scales + int64_t{t} * p.src_scale_bytes + range.scale_at,
                         static_cast<size_t>(range.scale_bytes)));
  }
  count_payload(p, range, part, places, moved);
}

/// Sends this warp's part of a message's row to every rank with one of the unit's experts. Settled on return. \returns those
/// ranks (bits)
template <class A, class P>
SWITCHYARD_FN uint64_t send_part(typename A::Warp& w, const P& p, int unit, int part, MoveCounter& moved) {
  WarpSpan<A> span(w, p.call, Event::send_rows, 1);
  const uint64_t places = ranks_of<A>(w, p, unit), before = moved.remote_bytes;
  if (places == 0) return 0;
  if (carries_row(p, unit)) send_payload<A>(w, p, unit, p.layout.token_of(unit), part, places, moved);
  span.set_bytes(moved.remote_bytes - before);
  A::settle(w);
  return places;
}

/// Announces to the ranks in `places` that the message has arrived, and to the others that it will not arrive.
template <class A, class P>
SWITCHYARD_FN void announce_message(typename A::Warp& w, const P& p, int unit, uint64_t places) {
  A::template publish_to<Scope::system>(
      w, p.call.world(),
      [&](int r) {
        uint64_t* flag = reach<A>(p.call.heap, r, p.layout.arrival(p.call.epoch, p.call.rank(), unit));
        return FlagStore{flag, flag_word(p.call.epoch, places >> r & 1)};
      },
      Site::message);
}

/// Number of messages that a block of `warps` warps sends at a time, using `parts` warps for each: as many as leave one warp
/// free, but at least one. If each warp sends a whole message, this is the number of warps.
SWITCHYARD_FN inline int sending_teams(int warps, int parts) {
  if (parts == 1) return warps;
  return warps > 2 * parts ? (warps - 1) / parts : 1;
}

/// A warp's role in sending the messages of its block. The warps beyond the teams are helpers, which send entries. If there are
/// no helpers, a team's first warp sends the entries after its part of the row.
struct Sender {
  int team = 0, part = 0;
  int helpers = 0;                       ///< number in the block
  int entries_of = 0, entries_step = 1;  ///< first team whose entries this warp sends, and step to the next one
  template <class Warp, class P>
  SWITCHYARD_FN Sender(const Warp& w, const P& p) : part(w.warp()), helpers(w.warps_per_block() - p.teams * p.parts) {
    if (p.parts == 1) {
      team = part;
      part = 0;
    } else {
      SWITCHYARD_ROLLED
      for (; part >= p.parts; part -= p.parts) ++team;  // few iterations
    }
    entries_step = helpers > 0 ? helpers : p.teams;
    const int helper = w.warp() - p.teams * p.parts;
    entries_of = helpers == 0 && part == 0 ? team : helper >= 0 ? helper : p.teams;
  }
};

/// Sends all messages of this rank; consecutive messages go to different blocks. Called by all warps of all blocks.
template <class A, class P>
SWITCHYARD_FN void send_messages(typename A::Warp& w, const P& p, MoveCounter& moved) {
  const Sender me(w, p);
  const int units = p.tokens * p.layout.units_per_token(), blocks = w.num_blocks(), teams = p.teams;
  int announcer = 0;  // rotates, so that the other warps continue while one waits for the fence
  for (int first = w.block(); first < units; first += blocks * teams) {
    const int unit = first + me.team * blocks;
    const bool mine = me.team < teams && unit < units;
    const uint64_t places = mine ? send_part<A>(w, p, unit, me.part, moved) : 0;
    SWITCHYARD_ROLLED
    for (int team = me.entries_of; team < teams && first + team * blocks < units; team += me.entries_step)
      send_entries<A>(w, p, first + team * blocks);
    if (p.parts > 1) A::block_sync(w);
    if (mine && me.part == announcer) announce_message<A>(w, p, unit, places);
    announcer = announcer + 1 < p.parts ? announcer + 1 : 0;
  }
}

/// Waits for a message. On success, sets `here` to whether the message is for this rank.
template <class A, class Layout>
SWITCHYARD_FN bool wait_message(typename A::Warp& w, const CallContext& call, const Layout& l, int source, int unit, bool& here,
                                LastWait<A>& last) {
  WarpSpan<A> span(w, call);  // opened only if there is a wait
  const uint64_t* flag = call.heap.local(l.arrival(call.epoch, source, unit));
  uint64_t word = A::template load_acquire<Scope::system>(flag, Site::message);
  if (!flag_reached(word, call.word())) {
    span.begin(Event::wait_message, source);
    WaitClock<A> clock(source);
    do {
      if (!clock.keep_waiting(w, call, Site::message, flag, call.word())) return false;
      word = A::template load_acquire<Scope::system>(flag, Site::message);
    } while (!flag_reached(word, call.word()));
    last.set(w, call, source, clock.spent());
  }
  here = flag_value(word) != 0;
  return true;
}

/// After wait_entered, calls f(source, unit, piece) for this warp's share of all messages from all ranks, split evenly for any
/// T. Stops and returns false if f returns false.
template <class A, class Layout, class F>
SWITCHYARD_FN bool for_each_message(typename A::Warp& w, const CallContext& call, const Layout& l, F&& f) {
  for (int64_t i = receiving_index(w);; i += w.total()) {
    const ItemPiece at = split_index(i, l);
    const Located message =
        A::locate(w, at.item, call.world(), [&](int s) { return int64_t{tokens_of(call, l, s)} * l.units_per_token(); });
    if (message.segment == call.world()) return true;
    if (!f(message.segment, static_cast<int>(message.offset), at.piece)) return false;
  }
}

}  // namespace switchyard::detail

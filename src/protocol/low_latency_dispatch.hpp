// SPDX-License-Identifier: Apache-2.0
// Low-latency dispatch: messages go to a slot fixed by (source, unit), counts travel inside their flags, and the receiver packs
// the rows per expert as they arrive.
//
// | flag         | written by        | read by            | order           | scope  | reuse                                 |
// | expert_count | each rank         | the expert's rank  | none            | system | epoch; two sets by parity of the call |
// | message      | a source's block  | receiver's warps   | release/acquire | system | epoch; two sets by parity of the call |
//
// A message is sent by `parts` warps of a block, each with some of the channels; behind a block barrier one of them announces
// it: one fence a message. A receiver places it in pieces, by warps on different multiprocessors.
//
// A message of a set is read in the call that it was written in only, so it may be overwritten two calls later
// (low_latency_call.hpp). Progress: all warps send before they wait, and what they wait for are remote sends; no barrier
// follows a wait.
#pragma once

#include "protocol/low_latency_call.hpp"

namespace switchyard::detail {

/// Trivially copyable. Pointers are to this rank's private memory.
struct LowLatencyDispatchParams {
  CallContext call;
  LowLatencyLayout layout;

  // What is sent.
  const std::byte* x = nullptr;       ///< [T] rows of src_row_bytes
  const std::byte* scales = nullptr;  ///< [T] rows of src_scale_bytes, of fp8 rows
  int64_t tokens = 0;
  int64_t src_row_bytes = 0;
  int64_t src_scale_bytes = 0;
  DType src_type = DType::bf16;
  ScaleKind quantize = ScaleKind::none;
  int scale_group = kScaleGroup;
  int scale_element_bytes = 4;
  bool with_places = true;  ///< messages say where rows go; false: only to which experts
  IdReader ids;
  const float* weights = nullptr;  ///< [T * K] or null: 1
  int parts = 1;                   ///< warps that send a message together, at most those of a block; 1: blocks need no barrier
  int64_t part_columns = 0;        ///< channels of each, whole scale groups

  // What the owner keeps for combine.
  int32_t* own_ids = nullptr;     ///< [max_tokens * K], -1: no expert
  float* own_weights = nullptr;   ///< [max_tokens * K]
  int64_t* own_tokens = nullptr;  ///< [1] T

  // What arrives.
  std::byte* rows = nullptr;
  std::byte* out_scales = nullptr;
  ScalePlace scale_place;
  int32_t* rows_of_expert = nullptr;
  int64_t* source_range = nullptr;
  int64_t* row_source = nullptr;
  LowLatencyRoute* routes = nullptr;
  int64_t* source_tokens = nullptr;  ///< [W]
};

/// Some channels of a row, and where they lie in a message.
struct ColumnRange {
  int64_t column, columns, payload_at, payload_bytes, scale_at, scale_bytes;
};
/// The `index`-th range of `width` channels, whole scale groups; empty behind the end of the row.
template <class P>
SWITCHYARD_FN ColumnRange column_range(const P& p, int index, int64_t width) {
  const auto& l = p.layout;
  ColumnRange range;
  const int64_t begin = index * width, end = begin + width;
  range.column = begin < l.hidden ? begin : l.hidden;
  range.columns = (end < l.hidden ? end : l.hidden) - range.column;
  const int64_t element = p.quantize != ScaleKind::none ? 1 : static_cast<int64_t>(dtype_bytes(p.src_type));
  range.payload_at = range.column * element;
  range.payload_bytes = range.columns * element;
  const int64_t per_group = l.scale_bytes > 0 ? p.scale_element_bytes : 0;
  const int bits_of_group = p.scale_group == 128 ? 7 : p.scale_group == 64 ? 6 : 5;
  const auto groups = [&](int64_t columns) { return (columns + p.scale_group - 1) >> bits_of_group; };
  range.scale_at = groups(range.column) * per_group;
  range.scale_bytes = groups(range.columns) * per_group;
  return range;
}
template <class P>
SWITCHYARD_FN ColumnRange piece_range(const P& p, int piece) {
  return column_range(p, piece, p.layout.piece_columns);
}

/// How many of the first `tokens` tokens choose the expert: each counts once.
template <class A, class P>
SWITCHYARD_FN int64_t tokens_choosing(typename A::Warp& w, const P& p, int64_t tokens, int32_t expert) {
  const int topk = p.layout.topk;
  return A::count_where(w, tokens, [&](int64_t t) {
    bool chosen = false;
    SWITCHYARD_UNROLLED_BY_4
    for (int k = 0; k < topk; ++k) chosen |= p.ids(t * topk + k) == expert;
    return chosen;
  });
}

/// Writes entry j of unit's message at all ranks of `places`: what the receiver needs to place route k of token t.
template <class A, class P>
SWITCHYARD_FN void send_entry(typename A::Warp& w, const P& p, int64_t unit, int64_t t, int k, int j, uint64_t places) {
  const auto& l = p.layout;
  const int64_t begin = t * l.topk;
  const int32_t expert = p.ids(begin + k);
  LowLatencyEntry entry{expert, 0, p.weights ? p.weights[begin + k] : 1.0f, k};
  if (expert >= 0) {
    entry.k = nth_bit(A::lanes_where(w, l.topk, [&](int64_t g) { return p.ids(begin + g) == expert; }), 0);
    if (p.with_places) entry.index = static_cast<int32_t>(tokens_choosing<A>(w, p, t, expert));
    if (entry.k != k) entry.index |= LowLatencyEntry::kAlias;
  }
  A::for_lanes(w, p.call.world(), [&](int r) {
    if ((places >> r & 1) == 0) return;
    std::byte* message = p.call.heap.at(r, l.message(p.call.epoch, p.call.rank(), unit));
    reinterpret_cast<LowLatencyEntry*>(message + l.entries_at())[j] = entry;
  });
}

/// False of a route that travels alone and repeats an earlier one of its token.
template <class P>
SWITCHYARD_FN bool brings_row(const P& p, int64_t unit) {
  const auto& l = p.layout;
  if (l.entries == l.topk) return true;
  const int64_t begin = l.token_of(unit) * l.topk;
  const int k = l.first_k_of(unit);
  bool repeats = false;
  for (int g = 0; g < k; ++g) repeats |= p.ids(begin + g) == p.ids(begin + k);
  return !repeats;
}

/// Some channels of the payload, to the ranks of `places`.
template <class A, class P>
SWITCHYARD_FN void send_payload(typename A::Warp& w, const P& p, int64_t unit, int64_t t, int part, uint64_t places,
                                MoveCounter& moved) {
  const auto& l = p.layout;
  const ColumnRange range = column_range(p, part, p.part_columns);
  if (range.columns == 0) return;
  const std::byte* row = p.x + t * p.src_row_bytes;
  const auto message = [&](int i) {
    const int r = p.call.in_turn(i);
    return (places >> r & 1) ? p.call.heap.at(r, l.message(p.call.epoch, p.call.rank(), unit)) : nullptr;
  };
  if (p.quantize != ScaleKind::none) {
    A::quantize_to(
        w, p.call.world(),
        [&](int r) -> QuantizedRow {
          std::byte* at = message(r);
          if (at == nullptr) return {nullptr, nullptr};
          return {reinterpret_cast<uint8_t*>(at + range.payload_at), at + l.scales_at() + range.scale_at};
        },
        row + range.column * static_cast<int64_t>(dtype_bytes(p.src_type)), p.src_type, range.columns, p.quantize,
        p.scale_group);
  } else {
    A::multicast_to(
        w, p.call.world(),
        [&](int r) -> void* {
          std::byte* at = message(r);
          return at ? at + range.payload_at : nullptr;
        },
        row + range.payload_at, static_cast<size_t>(range.payload_bytes));
    if (p.scales != nullptr)
      A::multicast_to(
          w, p.call.world(),
          [&](int r) -> void* {
            std::byte* at = message(r);
            return at ? at + l.scales_at() + range.scale_at : nullptr;
          },
          p.scales + t * p.src_scale_bytes + range.scale_at, static_cast<size_t>(range.scale_bytes));
  }
  const auto bytes = static_cast<uint64_t>(range.payload_bytes + range.scale_bytes);
  const uint64_t own = places >> p.call.rank() & 1;
  moved.local_bytes += bytes * own;
  moved.remote_bytes += bytes * (static_cast<uint64_t>(bits(places)) - own);
  if (part == 0) moved.rows += static_cast<uint64_t>(bits(places));
}

/// This warp's part of a message, to every rank with one of the unit's experts. Settled. \returns those ranks (bits)
template <class A, class P>
SWITCHYARD_FN uint64_t send_part(typename A::Warp& w, const P& p, int64_t unit, int part, MoveCounter& moved) {
  const auto& l = p.layout;
  const WarpSpan<A> span(w, p.call, Event::send_rows, 1);
  const int64_t t = l.token_of(unit);
  const int first_k = l.first_k_of(unit);
  const int64_t f = t * l.topk + first_k;
  const uint64_t places = A::lanes_union(w, l.entries, [&](int j) {
    const int32_t expert = p.ids(f + j);
    return expert >= 0 ? uint64_t{1} << l.owner(expert) : 0;
  });
  if (places == 0) return 0;
  if (brings_row(p, unit)) send_payload<A>(w, p, unit, t, part, places, moved);
  // While the row is under way.
  SWITCHYARD_ROLLED
  for (int j = part; j < l.entries; j += p.parts) send_entry<A>(w, p, unit, t, first_k + j, j, places);
  A::settle(w);
  return places;
}

/// Tells the ranks in `places` that the message is there, and the others that nothing comes.
template <class A, class P>
SWITCHYARD_FN void announce_message(typename A::Warp& w, const P& p, int64_t unit, uint64_t places) {
  A::template publish_to<Scope::system>(
      w, p.call.world(),
      [&](int r) {
        uint64_t* flag = p.call.heap.at(r, p.layout.arrival(p.call.epoch, p.call.rank(), unit));
        return FlagStore{flag, flag_word(p.call.epoch, places >> r & 1)};
      },
      Site::message);
}

/// What a warp does for the messages of its block, which sends `teams` at a time; its last warps belong to none, unless every
/// warp sends for itself or all are needed for one message.
struct Sender {
  int teams = 1, team = 0, part = 0;
  template <class Warp>
  SWITCHYARD_FN Sender(const Warp& w, int parts) : part(w.warp()) {
    if (parts == 1) {
      teams = w.warps_per_block();
      team = part;
      part = 0;
      return;
    }
    // No divisions: there are few.
    SWITCHYARD_ROLLED
    for (int used = 2 * parts; used < w.warps_per_block(); used += parts) ++teams;
    SWITCHYARD_ROLLED
    for (; part >= parts; part -= parts) ++team;
  }
  SWITCHYARD_FN bool sends() const { return team < teams; }
};

/// All messages of this rank, neighbours from different blocks. All warps of all blocks.
template <class A, class P>
SWITCHYARD_FN void send_messages(typename A::Warp& w, const P& p, MoveCounter& moved) {
  const Sender me(w, p.parts);
  const int64_t units = p.tokens * p.layout.units_per_token();
  int announcer = 0;  // takes turns: the others go on while it waits for the fence
  for (int64_t first = w.block(); first < units; first += int64_t{w.num_blocks()} * me.teams) {
    const int64_t unit = first + int64_t{me.team} * w.num_blocks();
    const bool mine = me.sends() && unit < units;
    const uint64_t places = mine ? send_part<A>(w, p, unit, me.part, moved) : 0;
    if (p.parts > 1) A::block_sync(w);
    if (mine && me.part == announcer) announce_message<A>(w, p, unit, places);
    announcer = announcer + 1 < p.parts ? announcer + 1 : 0;
  }
}

/// What combine will need of this rank's own routes: a share of the tokens.
template <class A, class P>
SWITCHYARD_FN void keep_own_routes(typename A::Warp& w, const P& p, Share share) {
  for (int64_t t = share.index; t < p.tokens; t += share.step) {
    A::for_lanes(w, p.layout.topk, [&](int k) {
      const int64_t f = t * p.layout.topk + k;
      p.own_ids[f] = p.ids(f);
      p.own_weights[f] = p.weights ? p.weights[f] : 1.0f;
    });
  }
  if (share.index == 0) A::for_lanes(w, 1, [&](int) { *p.own_tokens = p.tokens; });
}

/// Tells the ranks of a share of the experts how many rows come from here.
template <class A, class P>
SWITCHYARD_FN void send_counts(typename A::Warp& w, const P& p, Share share) {
  const auto& l = p.layout;
  const WarpSpan<A> span(w, p.call, Event::send_counts, l.map.experts);
  for (int64_t e = share.index; e < l.map.experts; e += share.step) {
    const int64_t n = tokens_choosing<A>(w, p, p.tokens, static_cast<int32_t>(e));
    const int owner = l.owner(static_cast<int>(e));
    uint64_t* flag =
        p.call.heap.at(owner, l.expert_count(p.call.epoch, static_cast<int>(e) - l.first_expert(owner), p.call.rank()));
    A::post(w, flag, flag_word(p.call.epoch, static_cast<uint64_t>(n)));
  }
}

/// The kind of a dispatch.
SWITCHYARD_FN inline uint64_t dispatch_kind() {
  return low_latency_kind(LowLatencyKind::dispatch, CombineOrder::per_route, DType::bf16);
}

/// Sending half; waits for nobody. Warps that send no messages count meanwhile; without any, all count afterwards.
template <class A, class P>
SWITCHYARD_FN void low_latency_send(typename A::Warp& w, const P& p) {
  MoveCounter moved;
  enter_call<A>(w, p.call, p.layout, p.tokens, dispatch_kind());
  const int busy = Sender(w, p.parts).teams * p.parts, free = w.warps_per_block() - busy;
  const int counts_in = free == 0 ? 1 : w.warp() >= busy ? 0 : -1;
  const Share share = free == 0 ? Share{spread_index(w), w.total()}
                                : Share{int64_t{w.warp() - busy} * w.num_blocks() + w.block(), int64_t{free} * w.num_blocks()};
  SWITCHYARD_ROLLED
  for (int step = 0; step < 2; ++step) {  // in either order, with one copy of the code
    if (step == counts_in) {
      send_counts<A>(w, p, share);
      keep_own_routes<A>(w, p, share);
    }
    if (step == (free == 0 ? 0 : 1)) send_messages<A>(w, p, moved);
  }
  A::settle(w);
  p.call.moved[w.index()] = moved;
}

/// Waits for the counts of all sources before `source` (W: of all) for n local experts expert(j), j in [0, n); -1: none.
template <class A, class P, class Expert>
SWITCHYARD_FN bool wait_counts_before(typename A::Warp& w, const P& p, int source, int n, const Expert& expert) {
  const auto& l = p.layout;
  WarpSpan<A> span(w, p.call, Event::wait_expert_count, -1);
  return wait_for<A>(
      w, p.call, n * source,
      [=, &p, &l](int i) -> const uint64_t* {
        const int e = expert(i / source);
        return p.call.heap.local(e >= 0 ? l.expert_count(p.call.epoch, e, i % source) : l.header(p.call.epoch, i % source));
      },
      p.call.word(), Site::expert_count, [=](int i) { return i % source; }, &span);
}

/// Waits for a message. On success `here` says whether it is for this rank.
template <class A, class Layout>
SWITCHYARD_FN bool wait_message(typename A::Warp& w, const CallContext& call, const Layout& l, int source, int64_t unit,
                                bool& here) {
  const WarpSpan<A> span(w, call, Event::wait_message, source);
  const uint64_t* flag = call.heap.local(l.arrival(call.epoch, source, unit));
  uint64_t word = A::template load_acquire<Scope::system>(flag, Site::message);
  if (!flag_reached(word, call.word())) {
    WaitClock<A> clock(source);
    do {
      if (!clock.keep_waiting(w, call, Site::message, flag, call.word())) return false;
      word = A::template load_acquire<Scope::system>(flag, Site::message);
    } while (!flag_reached(word, call.word()));
    clock.charge(w, call, source);
  }
  here = flag_value(word) != 0;
  return true;
}

/// After wait_entered: f(source, unit, piece) for this warp's share of all messages of all ranks, split evenly whatever their
/// T. Stops at the first false and returns it.
template <class A, class Layout, class F>
SWITCHYARD_FN bool for_each_message(typename A::Warp& w, const CallContext& call, const Layout& l, F&& f) {
  for (int64_t i = receiving_index(w);; i += w.total()) {
    const ItemPiece at = split_index(i, l);
    const Located message =
        A::locate(w, at.item, call.world(), [&](int s) { return tokens_of(call, l, s) * l.units_per_token(); });
    if (message.segment == call.world()) return true;
    if (!f(message.segment, message.offset, at.piece)) return false;
  }
}

/// Where the rows of a message's entries lie, into the warp's scratch: -1 for those that are not for this rank, -2 - row for
/// those that repeat an earlier one. Waits for counts.
template <class A, class P>
SWITCHYARD_FN bool find_rows(typename A::Warp& w, const P& p, const LowLatencyEntry* entries, int source, int64_t* row_of) {
  const auto& l = p.layout;
  const int first = l.first_expert(p.call.rank()), here = l.experts_of(p.call.rank());
  const auto counts_late = [&] {  // one look, which finds rows and what has not come
    return A::lanes_where(w, l.entries, [&](int j) {
      const LowLatencyEntry entry = entries[j];
      const int e = entry.expert - first;
      if (e < 0 || e >= here) {
        row_of[j] = -1;
        return false;
      }
      const uint64_t* counts = p.call.heap.local(l.expert_count(p.call.epoch, e, 0));  // one word per source
      int64_t row = e * l.rows_per_expert() + entry.place();
      bool late = false;
      SWITCHYARD_UNROLLED_BY_4
      for (int s = 0; s < source; ++s) {
        const uint64_t word = A::peek(counts + s);
        late |= !flag_reached(word, p.call.word());
        row += static_cast<int64_t>(flag_value(word));
      }
      row_of[j] = entry.alias() ? -2 - row : row;
      return late;
    });
  };
  while (counts_late() != 0)
    if (!wait_counts_before<A>(w, p, source, l.entries, [=](int j) {
          const int e = entries[j].expert - first;
          return e >= 0 && e < here ? e : -1;
        }))
      return false;
  A::settle(w);
  return true;
}

/// The same of scales whose columns lie apart, or with padding behind them: up to `end` of a row's bytes.
template <class A, class P>
SWITCHYARD_FN SWITCHYARD_OUTLINED void place_spread_scales(typename A::Warp& w, const P& p, const std::byte* scales,
                                                           int64_t begin, int64_t end, int n, const int64_t* row_of) {
  const auto step = static_cast<int>(p.scale_element_bytes);
  const auto count = static_cast<int>((end - begin) / step);
  A::for_lanes(w, static_cast<int64_t>(n) * count, [&](int i) {
    const int j = i / count;
    if (row_of[j] < 0) return;
    const int64_t b = begin + int64_t{i % count} * step;
    std::byte* to = p.out_scales + p.scale_place.at(row_of[j], b);
    if (step == 4)
      *reinterpret_cast<uint32_t*>(to) = b < p.layout.scale_bytes ? *reinterpret_cast<const uint32_t*>(scales + b) : 0;
    else
      *to = b < p.layout.scale_bytes ? scales[b] : std::byte{0};
  });
}

/// The scales of a piece, at `scales` and `fetched` from there, to the rows row_of[j] that are not negative, j in [0, n). The
/// last piece also writes the padding.
template <class A, class P, class Fetched>
SWITCHYARD_FN void place_scales(typename A::Warp& w, const P& p, const std::byte* scales, const Fetched& fetched, int piece,
                                const ColumnRange& range, int n, const int64_t* row_of) {
  const auto& place = p.scale_place;
  const int64_t end = range.scale_at + range.scale_bytes;
  const int64_t padded = piece + 1 == p.layout.pieces ? place.bytes_of_row() : end;
  if (place.column_major || p.scale_element_bytes != 4)
    return place_spread_scales<A>(w, p, scales, range.scale_at, padded, n, row_of);
  A::multicast_fetched(
      w, n,
      [&](int j) -> void* { return row_of[j] >= 0 ? p.out_scales + row_of[j] * place.row_bytes + range.scale_at : nullptr; },
      fetched);
  if (padded == end) return;
  A::for_lanes(w, n, [&](int j) {
    SWITCHYARD_ROLLED
    for (int64_t b = end; row_of[j] >= 0 && b < padded; b += 4)
      *reinterpret_cast<uint32_t*>(p.out_scales + row_of[j] * place.row_bytes + b) = 0;
  });
}

/// One piece of a message that has come: to the row of each of its experts here.
template <class A, class P>
SWITCHYARD_FN bool place_piece(typename A::Warp& w, const P& p, int source, int64_t unit, int piece) {
  const auto& l = p.layout;
  const int64_t t = l.token_of(unit);
  LowLatencyRoute* routes = p.routes + (source * l.max_tokens + t) * l.topk + l.first_k_of(unit);
  const ColumnRange range = piece_range(p, piece);
  const std::byte* const sent = p.call.heap.local(l.message(p.call.epoch, source, unit));
  bool here = false;
  if (!wait_message<A>(w, p.call, l, source, unit, here)) return false;
  if (!here) {
    if (piece == 0) A::for_lanes(w, l.entries, [&](int j) { routes[j] = {-1, 0.0f}; });
    return true;
  }
  const WarpSpan<A> span(w, p.call, Event::place_rows, 1);
  const auto payload = A::fetch(w, sent + range.payload_at, static_cast<size_t>(range.payload_bytes));
  const auto scales = A::fetch_words(w, sent + l.scales_at() + range.scale_at, static_cast<size_t>(range.scale_bytes));
  const auto* entries = reinterpret_cast<const LowLatencyEntry*>(sent + l.entries_at());
  auto* const row_of = reinterpret_cast<int64_t*>(w.scratch());
  if (!find_rows<A>(w, p, entries, source, row_of)) return false;
  A::multicast_fetched(
      w, l.entries,
      [&](int j) -> void* { return row_of[j] >= 0 ? p.rows + row_of[j] * l.payload_bytes + range.payload_at : nullptr; },
      payload);
  if (l.scale_bytes > 0) place_scales<A>(w, p, sent + l.scales_at(), scales, piece, range, l.entries, row_of);
  if (piece != 0) return true;
  A::for_lanes(w, l.entries, [&](int j) {
    const int64_t row = row_of[j] < -1 ? -2 - row_of[j] : row_of[j];
    routes[j] = {static_cast<int32_t>(row), row >= 0 ? entries[j].weight : 0.0f};
    if (row_of[j] >= 0) p.row_source[row] = pack_source(source, entries[j].k, t);
  });
  return true;
}

/// Counts and ranges of this rank's experts, and T of all sources: by the warps that have the fewest pieces to place.
template <class A, class P>
SWITCHYARD_FN bool report_counts(typename A::Warp& w, const P& p) {
  const auto& l = p.layout;
  const int world = p.call.world();
  const int64_t first_expert = w.total() - 1 - receiving_index(w);
  for (int64_t e = first_expert; e < l.experts_of(p.call.rank()); e += w.total()) {
    const int expert = static_cast<int>(e);
    if (!wait_counts_before<A>(w, p, world, 1, [=](int) { return expert; })) return false;
    const uint64_t* counts = p.call.heap.local(l.expert_count(p.call.epoch, expert, 0));
    A::for_lanes(w, world, [&](int s) {
      int64_t first = 0;
      SWITCHYARD_UNROLLED_BY_4
      for (int r = 0; r < s; ++r) first += static_cast<int64_t>(flag_value(A::peek(counts + r)));
      const auto rows = static_cast<int64_t>(flag_value(A::peek(counts + s)));
      p.source_range[e * world + s] = first << 32 | rows;
      if (s + 1 == world) p.rows_of_expert[e] = static_cast<int32_t>(first + rows);
    });
  }
  if (first_expert == 0) A::for_lanes(w, world, [&](int s) { p.source_tokens[s] = tokens_of(p.call, l, s); });
  return true;
}

/// Receiving half. False: the fault is recorded.
template <class A, class P>
SWITCHYARD_FN bool low_latency_receive(typename A::Warp& w, const P& p) {
  const auto& l = p.layout;
  if (!wait_entered<A>(w, p.call, l, dispatch_kind())) return false;
  const bool ok = for_each_message<A>(
      w, p.call, l, [&](int source, int64_t unit, int piece) { return place_piece<A>(w, p, source, unit, piece); });
  if (!ok) return false;
  if (!report_counts<A>(w, p)) return false;
  A::settle(w);
  return true;
}

}  // namespace switchyard::detail

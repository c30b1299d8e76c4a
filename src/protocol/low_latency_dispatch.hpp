// SPDX-License-Identifier: Apache-2.0
// Low-latency dispatch: messages go to a slot fixed by (source, unit), counts travel inside their flags, and the receiver packs
// the rows per expert as they arrive.
//
// | flag         | written by       | read by            | order           | scope  | reuse                                 |
// | expert_count | each rank        | the expert's rank  | release/acquire | system | epoch; two sets by parity of the call |
// | piece        | a source's warp  | receiver's warps   | release/acquire | system | epoch; two sets by parity of the call |
//
// A message of a set is read in the call that it was written in only, so it may be overwritten two calls later
// (low_latency_call.hpp). Progress: all warps send before they wait, and what they wait for are remote sends.
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

/// Channels of a piece, and where they lie in a sent row.
struct PieceRange {
  int64_t column, columns, payload_at, payload_bytes, scale_at, scale_bytes;
};
SWITCHYARD_FN inline PieceRange piece_range(const LowLatencyDispatchParams& p, int piece) {
  const LowLatencyLayout& l = p.layout;
  PieceRange range;
  range.column = l.column(piece);
  range.columns = l.column(piece + 1) - range.column;
  const int64_t element = p.quantize != ScaleKind::none ? 1 : static_cast<int64_t>(dtype_bytes(p.src_type));
  range.payload_at = range.column * element;
  range.payload_bytes = range.columns * element;
  const int64_t per_group = l.scale_bytes > 0 ? p.scale_element_bytes : 0;
  const auto groups = [&](int64_t columns) {  // 32 bits: GPUs divide them faster
    return static_cast<int64_t>((static_cast<uint32_t>(columns) + static_cast<uint32_t>(p.scale_group) - 1) /
                                static_cast<uint32_t>(p.scale_group));
  };
  range.scale_at = groups(range.column) * per_group;
  range.scale_bytes = groups(range.columns) * per_group;
  return range;
}

/// How many of the first `tokens` tokens choose the expert: each counts once.
template <class A>
SWITCHYARD_FN int64_t tokens_choosing(typename A::Warp& w, const LowLatencyDispatchParams& p, int64_t tokens, int32_t expert) {
  const int64_t routes = tokens * p.layout.topk;
  if (const int32_t* firsts = p.ids.firsts) return A::count_where(w, routes, [&](int64_t f) { return firsts[f] == expert; });
  return A::count_where(w, routes, [&](int64_t f) { return p.ids(f) == expert && p.ids.is_first_of_token(f, p.layout.topk); });
}

/// Writes entry j of unit's message at all ranks of `places`: what the receiver needs to place route k of token t.
template <class A>
SWITCHYARD_FN void send_entry(typename A::Warp& w, const LowLatencyDispatchParams& p, int64_t unit, int64_t t, int k, int j,
                              uint64_t places) {
  const LowLatencyLayout& l = p.layout;
  const int64_t begin = t * l.topk;
  const int32_t expert = p.ids(begin + k);
  LowLatencyEntry entry{expert, 0, p.weights ? p.weights[begin + k] : 1.0f, k};
  if (expert >= 0) {
    int64_t first = begin;
    SWITCHYARD_ROLLED
    while (p.ids(first) != expert) ++first;
    if (p.with_places) entry.index = static_cast<int32_t>(tokens_choosing<A>(w, p, t, expert));
    if (first != begin + k) entry.index |= LowLatencyEntry::kAlias;
    entry.k = static_cast<int32_t>(first - begin);
  }
  A::for_lanes(w, p.call.world(), [&](int r) {
    if ((places >> r & 1) == 0) return;
    std::byte* message = p.call.heap.at(r, l.message(p.call.epoch, p.call.rank(), unit));
    reinterpret_cast<LowLatencyEntry*>(message + l.entries_at())[j] = entry;
  });
}

/// The payload of one piece, to the ranks of `places`.
template <class A>
SWITCHYARD_FN void send_payload(typename A::Warp& w, const LowLatencyDispatchParams& p, int64_t unit, int64_t t, int piece,
                                uint64_t places, MoveCounter& moved) {
  const LowLatencyLayout& l = p.layout;
  const PieceRange range = piece_range(p, piece);
  const std::byte* row = p.x + t * p.src_row_bytes;
  const auto message = [&](int r) {
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
  if (piece == 0) moved.rows += static_cast<uint64_t>(bits(places));
}

/// One piece of one unit: to every rank with one of its experts; to the others, that nothing comes.
template <class A>
SWITCHYARD_FN void send_piece(typename A::Warp& w, const LowLatencyDispatchParams& p, int64_t unit, int piece,
                              MoveCounter& moved) {
  const LowLatencyLayout& l = p.layout;
  const WarpSpan<A> span(w, p.call, Event::send_rows, 1);
  const int64_t t = l.token_of(unit);
  const int first_k = l.first_k_of(unit);
  const int64_t f = t * l.topk + first_k;
  const uint64_t places = A::lanes_union(w, l.entries, [&](int j) {
    const int32_t expert = p.ids(f + j);
    return expert >= 0 ? uint64_t{1} << l.owner(expert) : 0;
  });
  if (places != 0) {
    // A route that travels alone and repeats an earlier one brings no row.
    if (l.entries > 1 || l.topk == 1 || p.ids.is_first(t * l.topk, f)) send_payload<A>(w, p, unit, t, piece, places, moved);
    SWITCHYARD_ROLLED
    for (int j = piece; j < l.entries; j += l.pieces) send_entry<A>(w, p, unit, t, first_k + j, j, places);
    A::settle(w);
  }
  A::template publish_to<Scope::system>(
      w, p.call.world(),
      [&](int r) {
        uint64_t* flag = p.call.heap.at(r, l.piece(p.call.epoch, p.call.rank(), unit, piece));
        return FlagStore{flag, flag_word(p.call.epoch, places >> r & 1)};
      },
      Site::piece);
}

/// What combine will need of this rank's own routes.
template <class A>
SWITCHYARD_FN void keep_own_routes(typename A::Warp& w, const LowLatencyDispatchParams& p) {
  for (int64_t t = spread_index(w); t < p.tokens; t += w.total()) {
    A::for_lanes(w, p.layout.topk, [&](int k) {
      const int64_t f = t * p.layout.topk + k;
      p.own_ids[f] = p.ids(f);
      p.own_weights[f] = p.weights ? p.weights[f] : 1.0f;
    });
  }
  if (w.index() == 0) A::for_lanes(w, 1, [&](int) { *p.own_tokens = p.tokens; });
}

/// All pieces of all units of this rank.
template <class A>
SWITCHYARD_FN void send_pieces(typename A::Warp& w, const LowLatencyDispatchParams& p, MoveCounter& moved) {
  const LowLatencyLayout& l = p.layout;
  const int64_t items = p.tokens * l.units_per_token() * l.pieces;
  for (int64_t i = spread_index(w); i < items; i += w.total()) {
    const ItemPiece at = split_index(i, l.pieces);
    send_piece<A>(w, p, at.item, at.piece, moved);
  }
}

/// The kind of a dispatch.
SWITCHYARD_FN inline uint64_t dispatch_kind() {
  return low_latency_kind(LowLatencyKind::dispatch, CombineOrder::per_route, DType::bf16);
}

/// Sending half; waits for nobody. Warps take pieces from the front and counts from the back, so that warps without a piece
/// count while the others send.
template <class A>
SWITCHYARD_FN void low_latency_send(typename A::Warp& w, const LowLatencyDispatchParams& p) {
  const LowLatencyLayout& l = p.layout;
  MoveCounter moved;
  if (w.index() == 0) enter_call<A>(w, p.call, l, p.tokens, dispatch_kind());
  send_pieces<A>(w, p, moved);
  const WarpSpan<A> span(w, p.call, Event::send_counts, l.map.experts);
  for (int64_t e = w.total() - 1 - spread_index(w); e < l.map.experts; e += w.total()) {
    const int64_t n = tokens_choosing<A>(w, p, p.tokens, static_cast<int32_t>(e));
    const int owner = l.owner(static_cast<int>(e));
    uint64_t* flag =
        p.call.heap.at(owner, l.expert_count(p.call.epoch, static_cast<int>(e) - l.first_expert(owner), p.call.rank()));
    A::template store_release<Scope::system>(w, flag, flag_word(p.call.epoch, static_cast<uint64_t>(n)), Site::expert_count);
  }
  keep_own_routes<A>(w, p);
  A::settle(w);
  p.call.moved[w.index()] = moved;
}

/// Rows of sources before `source` for local expert e; its counts have been acquired.
SWITCHYARD_FN inline int64_t first_of_source(const LowLatencyDispatchParams& p, int e, int source) {
  const uint64_t* counts = p.call.heap.local(p.layout.expert_count(p.call.epoch, e, 0));  // one word per source
  int64_t first = 0;
  for (int s = 0; s < source; ++s) first += static_cast<int64_t>(flag_value(counts[s]));
  return first;
}

/// Waits for the counts of all sources before `source` (W: of all) for n local experts expert(j), j in [0, n); -1: none.
template <class A, class Expert>
SWITCHYARD_FN bool wait_counts_before(typename A::Warp& w, const LowLatencyDispatchParams& p, int source, int n,
                                      Expert&& expert) {
  const LowLatencyLayout& l = p.layout;
  WarpSpan<A> span(w, p.call, Event::wait_expert_count, -1);
  return wait_for<A>(
      w, p.call, n * source,
      [&](int i) -> const uint64_t* {
        const int e = expert(i / source);
        return p.call.heap.local(e >= 0 ? l.expert_count(p.call.epoch, e, i % source) : l.header(p.call.epoch, i % source));
      },
      p.call.word(), Site::expert_count, [&](int i) { return i % source; }, &span);
}

/// Waits for all pieces of a message. On success `here` says whether it is for this rank.
template <class A>
SWITCHYARD_FN bool wait_message(typename A::Warp& w, const CallContext& call, const LowLatencyLayout& l, int source,
                                int64_t unit, bool& here) {
  const WarpSpan<A> span(w, call, Event::wait_piece, source);
  const auto flag = [&](int i) { return call.heap.local(l.piece(call.epoch, source, unit, i)); };
  const bool ok = wait_for<A>(w, call, l.pieces, flag, call.word(), Site::piece, [&](int) { return source; });
  here = ok && flag_value(*flag(0)) != 0;
  return ok;
}

/// After wait_entered: f(source, unit, piece) for this warp's share of all messages of all ranks, split evenly whatever their
/// T. Stops at the first false and returns it.
template <class A, class F>
SWITCHYARD_FN bool for_each_message(typename A::Warp& w, const CallContext& call, const LowLatencyLayout& l, F&& f) {
  const auto units_of = [&](int s) { return tokens_of(call, l, s) * l.units_per_token(); };
  int64_t units = 0;
  for (int s = 0; s < call.world(); ++s) units += units_of(s);
  if (units == 0) return true;
  for (int64_t i = receiving_index(w); i < units * l.pieces; i += w.total()) {
    const auto piece = static_cast<uint32_t>(i) / static_cast<uint32_t>(units);
    const Located message = A::locate(w, i - piece * units, call.world(), units_of);
    if (!f(message.segment, message.offset, static_cast<int>(piece))) return false;
  }
  return true;
}

/// Entries of a message for experts of this rank, and where it lies.
struct Message {
  const std::byte* payload;
  const LowLatencyEntry* entries;
  uint64_t mine;  ///< bit j: entry j is for an expert here
};
template <class A>
SWITCHYARD_FN Message message_from(typename A::Warp& w, const CallContext& call, const LowLatencyLayout& l, int source,
                                   int64_t unit) {
  Message m;
  m.payload = call.heap.local(l.message(call.epoch, source, unit));
  m.entries = reinterpret_cast<const LowLatencyEntry*>(m.payload + l.entries_at());
  const int first = l.first_expert(call.rank()), last = first + l.experts_of(call.rank());
  m.mine = A::lanes_where(w, l.entries, [&](int64_t j) { return m.entries[j].expert >= first && m.entries[j].expert < last; });
  return m;
}

/// One piece of a message that has come: to the row of each of its experts here.
template <class A>
SWITCHYARD_FN bool place_piece(typename A::Warp& w, const LowLatencyDispatchParams& p, int source, int64_t unit, int piece) {
  const LowLatencyLayout& l = p.layout;
  const int64_t t = l.token_of(unit);
  const int first_k = l.first_k_of(unit);
  LowLatencyRoute* routes = p.routes + (source * l.max_tokens + t) * l.topk + first_k;
  bool here = false;
  if (!wait_message<A>(w, p.call, l, source, unit, here)) return false;
  if (!here) {
    if (piece == 0) A::for_lanes(w, l.entries, [&](int j) { routes[j] = {-1, 0.0f}; });
    return true;
  }
  const Message m = message_from<A>(w, p.call, l, source, unit);
  const LowLatencyEntry* entries = m.entries;
  const std::byte* message = m.payload;
  const uint64_t mine = m.mine;
  const int first = l.first_expert(p.call.rank());
  if (!wait_counts_before<A>(w, p, source, l.entries, [&](int j) { return mine >> j & 1 ? entries[j].expert - first : -1; }))
    return false;
  const WarpSpan<A> span(w, p.call, Event::place_rows, 1);
  auto* const row_of = reinterpret_cast<int64_t*>(w.scratch());  // of entry j: its row, -1 if it is not for this rank
  A::for_lanes(w, l.entries, [&](int j) {
    const int e = entries[j].expert - first;
    row_of[j] = (mine >> j & 1) == 0 ? -1 : e * l.rows_per_expert() + first_of_source(p, e, source) + entries[j].place();
  });
  A::settle(w);
  const auto placed = [&](int j) { return row_of[j] >= 0 && !entries[j].alias(); };
  const PieceRange range = piece_range(p, piece);
  A::multicast_to(
      w, l.entries,
      [&](int j) -> void* { return placed(j) ? p.rows + row_of[j] * l.payload_bytes + range.payload_at : nullptr; },
      message + range.payload_at, static_cast<size_t>(range.payload_bytes));
  if (l.scale_bytes > 0) {  // the last piece also writes the padding
    const int64_t end = piece + 1 == l.pieces ? p.scale_place.bytes_of_row() : range.scale_at + range.scale_bytes;
    const auto step = static_cast<int>(p.scale_element_bytes);
    const auto count = static_cast<int>((end - range.scale_at) / step);
    const std::byte* scales = message + l.scales_at();
    A::for_lanes(w, static_cast<int64_t>(l.entries) * count, [&](int i) {
      const int j = i / count;
      if (!placed(j)) return;
      const int64_t b = range.scale_at + int64_t{i % count} * step;
      std::byte* to = p.out_scales + p.scale_place.at(row_of[j], b);
      if (step == 4)
        *reinterpret_cast<uint32_t*>(to) = b < l.scale_bytes ? *reinterpret_cast<const uint32_t*>(scales + b) : 0;
      else
        *to = b < l.scale_bytes ? scales[b] : std::byte{0};
    });
  }
  if (piece != 0) return true;
  A::for_lanes(w, l.entries, [&](int j) {
    const int64_t row = row_of[j];
    routes[j] = {static_cast<int32_t>(row), row >= 0 ? entries[j].weight : 0.0f};
    if (placed(j)) p.row_source[row] = pack_source(source, entries[j].k, t);
  });
  return true;
}

/// Counts and ranges of this rank's experts, and T of all sources.
template <class A>
SWITCHYARD_FN bool report_counts(typename A::Warp& w, const LowLatencyDispatchParams& p) {
  const LowLatencyLayout& l = p.layout;
  const int world = p.call.world();
  for (int e = static_cast<int>(w.total() - 1 - spread_index(w)); e < l.experts_of(p.call.rank()); e += w.total()) {
    if (!wait_counts_before<A>(w, p, world, 1, [&](int) { return e; })) return false;
    A::for_lanes(w, world, [&](int s) {
      const int64_t first = first_of_source(p, e, s), next = first_of_source(p, e, s + 1);
      p.source_range[int64_t{e} * world + s] = first << 32 | (next - first);
      if (s + 1 == world) p.rows_of_expert[e] = static_cast<int32_t>(next);
    });
  }
  if (w.index() == 0) A::for_lanes(w, world, [&](int s) { p.source_tokens[s] = tokens_of(p.call, l, s); });
  return true;
}

/// Receiving half. False: the fault is recorded.
template <class A>
SWITCHYARD_FN bool low_latency_receive(typename A::Warp& w, const LowLatencyDispatchParams& p) {
  const LowLatencyLayout& l = p.layout;
  if (!wait_entered<A>(w, p.call, l, dispatch_kind())) return false;
  {
    const bool ok = for_each_message<A>(
        w, p.call, l, [&](int source, int64_t unit, int piece) { return place_piece<A>(w, p, source, unit, piece); });
    if (!ok) return false;
  }
  if (!report_counts<A>(w, p)) return false;
  A::settle(w);
  return true;
}

}  // namespace switchyard::detail

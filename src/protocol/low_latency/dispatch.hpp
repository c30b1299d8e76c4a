// SPDX-License-Identifier: Apache-2.0
// Low-latency dispatch: rows are sent as messages, and the receiver packs them by expert as they arrive.
//
// | flag         | written by        | read by            | order           | scope  | reuse                                 |
// | expert_count | each rank         | the expert's rank  | none            | system | epoch; two sets by parity of the call |
//
// low_latency/messages.hpp documents messages and their flags. Progress: all warps send before they wait; they wait only for
// remote sends, and no barrier follows a wait.
#pragma once

#include "protocol/low_latency/messages.hpp"

namespace switchyard::detail {

/// For a share of the tokens, stores the data about this rank's own routes that combine needs.
template <class A, class P>
SWITCHYARD_FN void keep_own_routes(typename A::Warp& w, const P& p, Share share) {
  for (int64_t t = share.index; t < p.tokens; t += share.step) {
    A::for_lanes(w, p.layout.topk, [&](int k) {
      const int f = static_cast<int>(t) * p.layout.topk + k;
      p.own_ids[f] = p.ids(f);
      p.own_weights[f] = p.weights ? p.weights[f] : 1.0f;
    });
  }
  if (share.index == 0) A::for_lanes(w, 1, [&](int) { *p.own = {p.tokens, p.call.epoch}; });
}

/// For a share of the experts, sends the number of this rank's rows to the expert's rank.
template <class A, class P>
SWITCHYARD_FN void send_counts(typename A::Warp& w, const P& p, Share share) {
  const auto& l = p.layout;
  const WarpSpan<A> span(w, p.call, Event::send_counts, l.map.experts);
  for (int64_t e = share.index; e < l.map.experts; e += share.step) {
    const int n = tokens_choosing<A>(w, p, p.tokens, static_cast<int32_t>(e));
    const int owner = l.owner(static_cast<int>(e));
    if (!is_mapped<A>(p.call.heap, owner)) continue;
    uint64_t* flag =
        p.call.heap.at(owner, l.expert_count(p.call.epoch, static_cast<int>(e) - l.first_expert(owner), p.call.rank()));
    A::post(w, flag, flag_word(p.call.epoch, static_cast<uint64_t>(n)));
  }
}

/// Header value for a dispatch.
template <class P>
SWITCHYARD_FN uint64_t dispatch_header(const P& p) {
  return header_value(low_latency_kind(LowLatencyKind::dispatch, p.selects ? 1 : 0, DType::bf16),
                      sent_detail(p.map_version, p.tokens));
}

/// Sending half; does not wait. Helpers with no entries to send count first; if every helper has entries, all helpers count
/// before they send them. Without helpers, all warps count after sending.
template <class A, class P>
SWITCHYARD_FN void low_latency_send(typename A::Warp& w, const P& p) {
  MoveCounter moved;
  enter_call<A>(w, p.call, p.layout, dispatch_header(p));
  const int warps = w.warps_per_block(), helpers = warps - p.teams * p.parts;
  const int counting = helpers == 0 ? warps : helpers > p.teams ? helpers - p.teams : helpers;
  const int counter = w.warp() - (warps - counting);
  const Share share{int64_t{counter} * w.num_blocks() + w.block(), int64_t{counting} * w.num_blocks()};
  const int counts_in = counter < 0 ? -1 : helpers == 0 ? 1 : 0;
  SWITCHYARD_ROLLED
  for (int step = 0; step < 2; ++step) {  // in either order, with a single copy of the code
    if (step == counts_in) {
      send_counts<A>(w, p, share);
      keep_own_routes<A>(w, p, share);
    }
    if (step == (helpers == 0 ? 0 : 1)) send_messages<A>(w, p, moved);
  }
  A::settle(w);
  p.call.moved[w.index()] = moved;
}

/// Waits for the counts from all sources before `source` (W: from all sources) for n local experts expert(j), j in [0, n); -1:
/// none.
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
      p.call.word(), Site::expert_count, [=](int i) { return i % source; }, span);
}

/// Writes the rows of a message's entries to the warp's scratch: -1 for entries that are not for this rank, and -2 - row for
/// entries that repeat an earlier one. Waits for counts.
template <class A, class P>
SWITCHYARD_FN bool find_rows(typename A::Warp& w, const P& p, const LowLatencyEntry* entries, int source, int64_t* row_of) {
  const auto& l = p.layout;
  const int first = l.first_expert(p.call.rank()), here = l.experts_of(p.call.rank());
  const auto counts_late = [&] {  // one pass finds the rows and any missing counts
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

/// True if a row's scales are contiguous words, like the row itself.
template <class P>
SWITCHYARD_FN bool scales_in_rows(const P& p) {
  return !p.scale_place.column_major && p.scale_element_bytes == 4;
}
/// One past the last scale byte of a piece; the last piece of a row includes the padding.
template <class P>
SWITCHYARD_FN int64_t end_of_scales(const P& p, int piece, const ColumnRange& range) {
  return piece + 1 == p.layout.pieces ? p.scale_place.bytes_of_row() : range.scale_at + range.scale_bytes;
}

/// Writes the scales of a piece, `fetched`, to each non-negative row row_of[j], j in [0, n). The last piece also writes the
/// padding.
template <class A, class P, class Fetched>
SWITCHYARD_FN void place_scale_rows(typename A::Warp& w, const P& p, const Fetched& fetched, int piece,
                                    const ColumnRange& range, int n, const int64_t* row_of) {
  const auto& place = p.scale_place;
  A::multicast_fetched(
      w, n,
      [&](int j) -> void* { return row_of[j] >= 0 ? p.out_scales + row_of[j] * place.row_bytes + range.scale_at : nullptr; },
      fetched);
  const int64_t end = range.scale_at + range.scale_bytes, padded = end_of_scales(p, piece, range);
  if (padded == end) return;
  A::for_lanes(w, n, [&](int j) {
    SWITCHYARD_ROLLED
    for (int64_t b = end; row_of[j] >= 0 && b < padded; b += 4)
      *reinterpret_cast<uint32_t*>(p.out_scales + row_of[j] * place.row_bytes + b) = 0;
  });
}

/// Like place_scale_rows, for scales that are single bytes or column-major; each lane processes one scale, row by row. Clobbers
/// `row_of`.
template <class A, class P>
SWITCHYARD_FN void spread_scales(typename A::Warp& w, const P& p, const std::byte* scales, int piece, const ColumnRange& range,
                                 int n, int64_t* row_of) {
  const auto& place = p.scale_place;
  const int step = p.scale_element_bytes, begin = range.scale_at, sent = p.layout.scale_bytes;
  const int count = (static_cast<int>(end_of_scales(p, piece, range)) - begin) / step;
  uint64_t rows = A::lanes_where(w, n, [&](int j) { return row_of[j] >= 0; });
  A::for_lanes(w, n, [&](int j) {
    if (row_of[j] >= 0) row_of[j] = place.begin_of(row_of[j]);
  });
  A::settle(w);
  for (; rows != 0; rows &= rows - 1) {
    std::byte* const to = p.out_scales + row_of[nth_bit(rows, 0)];
    A::for_lanes(w, count, [&](int i) {
      const int b = begin + i * step;
      if (step == 4)
        *reinterpret_cast<uint32_t*>(to + place.offset_of(b)) = b < sent ? *reinterpret_cast<const uint32_t*>(scales + b) : 0;
      else
        to[place.offset_of(b)] = b < sent ? scales[b] : std::byte{0};
    });
  }
}

/// Copies one piece of an arrived message to the row of each of its local experts.
template <class A, class P>
SWITCHYARD_FN bool place_piece(typename A::Warp& w, const P& p, int source, int unit, int piece, LastWait<A>& last) {
  const auto& l = p.layout;
  const int t = l.token_of(unit);
  LowLatencyRoute* routes = p.routes + int64_t{source * l.max_tokens + t} * l.topk + l.first_k_of(unit);
  const ColumnRange range = piece_range(p, piece);
  const std::byte* const sent = p.call.heap.local(l.message(p.call.epoch, source, unit));
  bool here = false;
  if (!wait_message<A>(w, p.call, l, source, unit, here, last)) return false;
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
  if (l.scale_bytes > 0 && scales_in_rows(p)) place_scale_rows<A>(w, p, scales, piece, range, l.entries, row_of);
  if (piece == 0)
    A::for_lanes(w, l.entries, [&](int j) {
      const int64_t row = row_of[j] < -1 ? -2 - row_of[j] : row_of[j];
      routes[j] = {static_cast<int32_t>(row), row >= 0 ? entries[j].weight : 0.0f};
      if (row_of[j] >= 0) p.row_source[row] = pack_source(source, entries[j].k, t);
    });
  if (l.scale_bytes > 0 && !scales_in_rows(p)) spread_scales<A>(w, p, sent + l.scales_at(), piece, range, l.entries, row_of);
  return true;
}

/// Reports the counts and ranges of this rank's experts, and the T of every source. Executed by the warps with the fewest
/// pieces to place.
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

/// Receiving half. Returns false after recording a fault.
template <class A, class P>
SWITCHYARD_FN bool low_latency_receive(typename A::Warp& w, const P& p) {
  const auto& l = p.layout;
  if (!wait_entered<A>(w, p.call, l, dispatch_header(p), kHeaderTokenBits, p.selects)) return false;
  LastWait<A> last;
  const bool ok = for_each_message<A>(
      w, p.call, l, [&](int source, int unit, int piece) { return place_piece<A>(w, p, source, unit, piece, last); });
  if (!ok) return false;
  last.account(w, p.call);
  if (!report_counts<A>(w, p)) return false;
  A::settle(w);
  return true;
}

}  // namespace switchyard::detail

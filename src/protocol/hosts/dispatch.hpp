// SPDX-License-Identifier: Apache-2.0
// Phases of a dispatch across several hosts, run by CPU workers and by kernels. A token crosses to each other destination host
// once, as a crossing row to its source's proxy. The proxy forwards it like one of its own tokens (send_records, send_row) and
// sets the flags that the source would set. Rows and records are placed at positions defined by the plan of all ranks. Rows for
// ranks on this host are sent as in a single-host dispatch.
//
//   pack_rows(k) -- round k --> forward_rows(k)      for each round k, three of them in flight
//   send_own_rows                                    after the first rounds have been posted
//   count_returned, finish_rows                      after the last round
//
// | flag      | written by                         | read by          | order           | scope  | reuse              |
// | placement | receiver and its proxies           | all sources      | release/acquire | system | epoch, never reset |
// | rows      | source's, or its proxy's, last warp | receiver's warps | release/acquire | system | epoch, never reset |
//
// All warps of a rank run a phase before any of them runs the next one. Buffers: a slot is packed again once its round has been
// sent, and receives again once its rows have been forwarded. Progress: only finish_rows waits, for `rows` of all sources; on
// every rank of this host, earlier phases set these flags and wait only for rounds.
#pragma once

#include "plan/hosts.hpp"
#include "protocol/hosts/message.hpp"
#include "protocol/normal/dispatch_direct.hpp"

namespace switchyard::detail {

/// A crossing row in a slot: the head, the places, ids, rows and weights of its routes, then the row and its scales as sent.
struct CrossingHead {
  int64_t token;
  int64_t places;
};
struct CrossingLayout {
  int topk = 0;
  int max_places = 0;   ///< maximum places per token on its destination host
  bool headers = true;  ///< false: cached dispatch, for which proxies have the headers in their handles
  bool expert_major = false;
  bool weights = false;
  int64_t row_bytes = 0, scale_bytes = 0;

  SWITCHYARD_FN int64_t places_at() const { return static_cast<int64_t>(sizeof(CrossingHead)); }
  SWITCHYARD_FN int64_t ids_at() const { return places_at() + static_cast<int64_t>(sizeof(SendEntry)) * max_places; }
  SWITCHYARD_FN int64_t rows_at() const { return ids_at() + int64_t{4} * topk; }
  SWITCHYARD_FN int64_t weights_at() const { return rows_at() + (expert_major ? int64_t{4} * topk : 0); }
  SWITCHYARD_FN int64_t row_at() const { return headers ? round_up(weights_at() + (weights ? int64_t{4} * topk : 0), 128) : 0; }
  SWITCHYARD_FN int64_t scale_at() const { return row_at() + round_up(row_bytes, 128); }
  SWITCHYARD_FN int64_t bytes() const { return scale_at() + round_up(scale_bytes, 128); }
};

/// Crossing rows from one source to one host: `per_round` of them in each round except the last.
struct CrossingRows {
  CrossingLayout layout;
  int64_t count = 0, per_round = 1;
  std::byte* slots = nullptr;  ///< [kRoundSlots] of slot_bytes()

  SWITCHYARD_FN int64_t rounds() const { return (count + per_round - 1) / per_round; }
  SWITCHYARD_FN int64_t begin(int64_t k) const { return k * per_round < count ? k * per_round : count; }
  SWITCHYARD_FN int64_t bytes(int64_t k) const { return (begin(k + 1) - begin(k)) * layout.bytes(); }
  SWITCHYARD_FN int64_t slot_bytes() const { return (count < per_round ? count : per_round) * layout.bytes(); }
  SWITCHYARD_FN std::byte* slot(int64_t k) const { return slots + k % kRoundSlots * slot_bytes(); }
};

/// Both directions of one rail in a dispatch. Trivially copyable; pointers refer to this rank's private memory.
struct DispatchRail {
  int peer = -1;
  uint64_t host_ranks = 0;           ///< of the peer's host, as bits
  uint64_t own_ranks = 0;            ///< of this rank's host, as bits
  const int32_t* leaving = nullptr;  ///< tokens that cross to the peer, if it is this rank's proxy; else null
  CrossingRows out, in;
  ReturnCounts returned;  ///< rows that the peer's host returns, by token of this rank; set where `leaving` is
  // The peer's tokens on this host, if this rank is its proxy.
  bool is_proxy_of_peer = false;
  CrossedTables crossed;             ///< complete in a cached dispatch; a fresh one fills it
  const int32_t* records = nullptr;  ///< [W] number of the peer's records at each rank
  uint64_t* arrivals = nullptr;      ///< number of warps that have finished a phase; 0 between phases

  /// True if the peer's rows are complete after round k.
  SWITCHYARD_FN bool ends_with(int64_t k) const {
    const int64_t rounds = in.rounds();
    return is_proxy_of_peer && k + 1 == (rounds > 1 ? rounds : 1);
  }
};

/// Source side: writes the head of crossing row `slot` of token t.
template <class A>
SWITCHYARD_FN void pack_head(typename A::Warp& w, const DispatchParams& p, const DispatchRail& rail, int64_t t,
                             std::byte* slot) {
  const CrossingLayout& at = rail.out.layout;
  const SendEntry* const entries = p.tables.sends.of(t);
  const uint64_t sent = A::lanes_where(w, p.tables.sends.places(t), [&](int i) {
    return entries[i].rank >= 0 && (rail.host_ranks >> entries[i].rank & 1) != 0;
  });
  const int places = bits(sent);
  A::for_lanes(w, 1, [&](int) { *reinterpret_cast<CrossingHead*>(slot) = {t, places}; });
  auto* const to = reinterpret_cast<SendEntry*>(slot + at.places_at());
  A::for_lanes(w, at.max_places, [&](int i) { to[i] = i < places ? entries[nth_bit(sent, i)] : SendEntry{-1, -1, -1}; });
  A::for_lanes(w, at.topk, [&](int k) {
    const int64_t f = t * at.topk + k;
    reinterpret_cast<int32_t*>(slot + at.ids_at())[k] = p.tables.ids[f];
    if (at.expert_major) reinterpret_cast<int32_t*>(slot + at.rows_at())[k] = p.tables.route_row[f];
    if (at.weights) reinterpret_cast<float*>(slot + at.weights_at())[k] = p.shape.weights[f];
  });
}

/// Proxy side: stores the head of crossing row `slot` under token number n.
template <class A>
SWITCHYARD_FN void keep_head(typename A::Warp& w, const CrossingLayout& at, const std::byte* slot, int64_t n,
                             const CrossedTables& to) {
  A::for_lanes(w, 1, [&](int) { to.token[n] = static_cast<int32_t>(reinterpret_cast<const CrossingHead*>(slot)->token); });
  const auto* const places = reinterpret_cast<const SendEntry*>(slot + at.places_at());
  A::for_lanes(w, to.stride, [&](int i) { to.sends[n * to.stride + i] = places[i]; });
  A::for_lanes(w, at.topk, [&](int k) {
    const int64_t f = n * at.topk + k;
    to.ids[f] = reinterpret_cast<const int32_t*>(slot + at.ids_at())[k];
    if (at.expert_major) to.route_row[f] = reinterpret_cast<const int32_t*>(slot + at.rows_at())[k];
    if (at.weights) to.weights[f] = reinterpret_cast<const float*>(slot + at.weights_at())[k];
  });
}

/// Source side, all warps: packs round k.
template <class A>
SWITCHYARD_FN void pack_rows(typename A::Warp& w, const DispatchParams& p, const DispatchRail& rail, int64_t k,
                             MoveCounter& moved) {
  WarpSpan<A> span(w, p.call, Event::pack_rows);
  const CrossingLayout& at = rail.out.layout;
  const MoveShape& s = p.shape;
  const int64_t begin = rail.out.begin(k), end = rail.out.begin(k + 1);
  int64_t rows = 0;
  for (int64_t n = begin + spread_index(w); n < end; n += w.total(), ++rows) {
    const int64_t t = rail.leaving[n];
    std::byte* const slot = rail.out.slot(k) + (n - begin) * at.bytes();
    if (at.headers) pack_head<A>(w, p, rail, t, slot);
    std::byte *const row = slot + at.row_at(), *const scale = slot + at.scale_at();
    const std::byte* const x = s.x + t * s.src_row_bytes;
    if (s.quantize != ScaleKind::none) {
      A::quantize_row(w, reinterpret_cast<uint8_t*>(row), scale, x, s.src_type, s.hidden, s.quantize);
      continue;
    }
    A::copy(w, row, x, static_cast<size_t>(at.row_bytes));
    if (s.scales) A::copy(w, scale, s.scales + t * at.scale_bytes, static_cast<size_t>(at.scale_bytes));
  }
  moved.metadata_bytes += static_cast<uint64_t>(rows * at.row_at());
  A::settle(w);
  span.set_arg(rows);  // their bytes are counted when rows are sent to ranks
}

/// Converts a rank's parameters to those of its peer's call, as made by the peer's proxy; tokens are the crossing tokens, by
/// number.
SWITCHYARD_FN inline void set_forwarding(DispatchParams& p, const DispatchRail& rail) {
  p.tokens = rail.in.count;
  p.shape.weights = rail.in.layout.weights ? rail.crossed.weights : nullptr;
  p.tables.sends = SendTable{rail.crossed.sends, nullptr, rail.crossed.stride};
  p.tables.ids = rail.crossed.ids;
  p.tables.route_row = rail.crossed.route_row;
}

/// Proxy side: sets the peer's `rows` flags once all its rows have been forwarded. Receivers treat the rows as the peer's first
/// chunk and find the other chunks empty. Call from one warp.
template <class A>
SWITCHYARD_FN void announce_forwarded_rows(typename A::Warp& w, const DispatchParams& p, const DispatchRail& rail) {
  const CallContext& call = p.call;
  const bool in_chunks = p.shape.layout == Layout::expert_major;
  for (int c = 0; c < (in_chunks ? kRowChunks : 1); ++c) {
    A::template publish_to<Scope::system>(
        w, call.world(),
        [&](int r) {
          const auto records = in_chunks ? static_cast<uint64_t>(rail.records[r]) : 0;
          return FlagStore{reach<A>(call.heap, r, p.shape.control.rows_flag(rail.peer, c)), flag_word(call.epoch, records)};
        },
        Site::rows);
  }
}

/// Proxy side, all warps: forwards the rows of round k and, after the last round, announces them. `p`: set_forwarding().
template <class A>
SWITCHYARD_FN void forward_rows(typename A::Warp& w, const DispatchParams& p, const DispatchRail& rail, int64_t k) {
  {
    WarpSpan<A> span(w, p.call, Event::forward_rows);
    const CrossingLayout& at = rail.in.layout;
    const int64_t begin = rail.in.begin(k), end = rail.in.begin(k + 1), first = begin + spread_index(w);
    const auto slot = [&](int64_t n) -> const std::byte* { return rail.in.slot(k) + (n - begin) * at.bytes(); };
    if (at.headers) {
      for (int64_t n = first; n < end; n += w.total()) keep_head<A>(w, at, slot(n), n, rail.crossed);
      A::settle(w);  // all lanes read the tables below
    }
    int64_t rows = 0;
    const int places = rail.crossed.stride;
    for (int64_t n = first; n < end; n += w.total(), ++rows) {
      const SendEntry* const entries = rail.crossed.sends + n * places;
      if (at.headers) send_records<A>(w, p, n, rail.crossed.token[n], entries, places);
      if (A::lanes_where(w, places, [&](int i) { return has_row(entries[i]); }) == 0) continue;
      send_row<A>(w, p, entries, places, slot(n) + at.row_at(), at.scale_bytes > 0 ? slot(n) + at.scale_at() : nullptr);
    }
    A::settle(w);
    span.set_arg(rows);
  }
  if (rail.ends_with(k) && arrive_is_last<A>(w, rail.arrivals)) announce_forwarded_rows<A>(w, p, rail);
}

/// All warps: sends this rank's rows for the ranks of its host, like dispatch_direct.
template <class A>
SWITCHYARD_FN void send_own_rows(typename A::Warp& w, const DispatchParams& p, MoveCounter& moved) {
  const int last = p.shape.layout == Layout::expert_major ? kRowChunks - 1 : 0;
  WorkQueue<A> tokens(p.work.sends_next, A::kTakenAtOnce);
  for (int c = 0; c <= last; ++c) {
    {
      WarpSpan<A> span(w, p.call, Event::send_rows);
      const MoveCounter before = moved;
      send_rows<A>(w, p, tokens, last > 0 ? row_chunk_end(p.tokens, c) : p.tokens, moved);
      span.set_arg(static_cast<int64_t>(moved.payload_rows - before.payload_rows));
      span.set_bytes(moved.remote_bytes - before.remote_bytes);
    }
    if (!arrive_is_last<A>(w, p.work.sends_done + c, w.total())) continue;
    if (c == last) WorkQueue<A>::reset(w, p.work.sends_next);
    if (c == 0) WorkQueue<A>::reset(w, p.work.places_next);  // for the previous call; no warp uses it before `rows`
    publish_rows<A>(w, p, c, last > 0);
  }
  const WarpSpan<A> span(w, p.call, Event::zero_padding, p.tables.num_padding);
  zero_padding<A>(w, p, destination(p, p.call.rank()), share_of_blocks(w, 0, w.num_blocks()));
  A::settle(w);
}

/// Replaces the rows of each group by the rows before it, after all groups of `n` tokens have been counted. Call from one warp.
template <class A>
SWITCHYARD_FN void sum_groups(typename A::Warp& w, const ReturnCounts& counts, int64_t n) {
  A::for_lanes(w, kReturnKinds, [&](int kind) {
    constexpr int kAhead = 8;  // several loads are in flight
    const int64_t groups = ReturnCounts::groups(n);
    int32_t before = 0;
    for (int64_t g = 0; g < groups; g += kAhead) {
      int32_t rows[kAhead];
      for (int i = 0; i < kAhead; ++i) rows[i] = g + i < groups ? counts.before_group[g + i].of[kind] : 0;
      for (int i = 0; i < kAhead && g + i < groups; ++i) {
        counts.before_group[g + i].of[kind] = before;
        before += rows[i];
      }
    }
  });
  A::settle(w);
}

/// Counts this warp's share of `n` tokens: rows(i) is returned_rows() of token i.
template <class A, class Rows>
SWITCHYARD_FN void count_groups(typename A::Warp& w, const ReturnCounts& counts, int64_t n, Rows&& rows) {
  constexpr int64_t kGroup = ReturnCounts::kGroup;
  for (int64_t g = spread_index(w); g < ReturnCounts::groups(n); g += w.total()) {
    const int64_t begin = g * kGroup, left = n - begin;
    const int here = static_cast<int>(left < kGroup ? left : kGroup);
    A::for_lanes(w, here, [&](int i) { counts.of_token[begin + i] = rows(begin + i); });
    A::settle(w);
    A::for_lanes(w, kReturnKinds, [&](int kind) {
      int64_t sum = 0;
      for (int i = 0; i < here; ++i) sum += counts.of(static_cast<ReturnKind>(kind), begin + i);
      counts.before_group[g].of[kind] = static_cast<int32_t>(sum);
    });
  }
}

/// All warps, at both ends of a rail, in a fresh dispatch after its last round: counts the rows that a combine will return.
/// `p`: of this rank.
template <class A>
SWITCHYARD_FN void count_returned(typename A::Warp& w, const DispatchParams& p, const DispatchRail& rail) {
  const int topk = p.shape.topk;
  const bool expert_major = p.shape.layout == Layout::expert_major;
  const auto route_row = [&](const int32_t* rows, int64_t i) { return expert_major ? rows + i * topk : nullptr; };
  if (rail.leaving != nullptr) {
    count_groups<A>(w, rail.returned, p.tokens, [&](int64_t t) {
      return returned_rows(p.tables.sends.of(t), p.tables.sends.places(t), p.tables.ids + t * topk,
                           route_row(p.tables.route_row, t), topk, p.shape.map, rail.host_ranks);
    });
  }
  const CrossedTables& crossed = rail.crossed;
  if (rail.is_proxy_of_peer) {
    count_groups<A>(w, crossed.returned, rail.in.count, [&](int64_t n) {
      return returned_rows(crossed.sends + n * crossed.stride, crossed.stride, crossed.ids + n * topk,
                           route_row(crossed.route_row, n), topk, p.shape.map, rail.own_ranks);
    });
  }
  A::settle(w);
  if (!arrive_is_last<A>(w, rail.arrivals)) return;
  if (rail.leaving != nullptr) sum_groups<A>(w, rail.returned, p.tokens);
  if (rail.is_proxy_of_peer) sum_groups<A>(w, crossed.returned, rail.in.count);
}

/// All warps, last phase: waits for the rows of all sources and places their repeated routes. Returns false after recording a
/// fault.
template <class A>
SWITCHYARD_FN bool finish_rows(typename A::Warp& w, const DispatchParams& p, MoveCounter& moved) {
  if (p.shape.layout != Layout::expert_major) return w.index() != 0 || wait_rows<A>(w, p, 0);
  const Destination mine = destination(p, p.call.rank());
  PlaceQueue<A> queue{WorkQueue<A>(p.work.places_next, PlaceQueue<A>::kBatch)};
  for (int c = 0; c < kRowChunks; ++c)
    if (!take_chunk<A>(w, p, mine, c, queue, moved)) return false;
  A::settle(w);
  return true;
}

}  // namespace switchyard::detail

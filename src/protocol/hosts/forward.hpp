// SPDX-License-Identifier: Apache-2.0
// Dispatch across several hosts. A token crosses to each other destination host once, as a crossing row to its source's proxy.
// The proxy forwards it like one of its own tokens (send_records, send_row) and sets the flags that the source would set. Rows
// and records are placed at positions defined by the plan of all ranks. Rows for ranks on this host are sent as in a
// single-host dispatch.
//
// | flag      | written by                               | read by           | order           | scope  | reuse              |
// | placement | receiver and its proxies                 | all sources       | release/acquire | system | epoch, never reset |
// | rows      | source's, or its proxy's, last warp      | receiver's warps  | release/acquire | system | epoch, never reset |
// | network   | warps of one rank: rounds.hpp                                                                            |
//
// Progress: crossing waits only for rounds, and sending a rank's own rows does not wait; warps wait for `rows` after both.
#pragma once

#include "plan/hosts.hpp"
#include "protocol/hosts/rounds.hpp"
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

/// Crossing rows from one source to one host.
struct CrossingRows : ItemsInRounds {
  CrossingLayout layout;
};

/// Both directions of one rail in a dispatch.
struct DispatchRail {
  int peer = -1;
  int host = -1;                     ///< of the peer
  const int32_t* leaving = nullptr;  ///< tokens that cross to the peer, if it is this rank's proxy
  CrossingRows out, in;
  // The peer's tokens on this host, if this rank is its proxy.
  bool is_proxy_of_peer = false;
  CrossedTokens* crossed = nullptr;  ///< complete in a cached dispatch; a fresh one fills it
  DispatchParams forward;            ///< of this call, with the tables of `crossed`
  int64_t source_tokens = 0;
  int announced_chunks = 0;  ///< number of chunks whose rows flags are set
  int32_t announced_records[kMaxRanks] = {};
};

/// Pointers refer to this rank's private memory.
struct HostDispatchParams {
  DispatchParams move;
  Rounds rounds;
  DispatchRail* rails = nullptr;
  PeerTransfer* transfers = nullptr;  ///< [num_rails]
  int num_rails = 0;
  const int* host_of = nullptr;  ///< [W]
};

/// Source side: writes crossing row `slot` of token t for `host`. The writes are pending on return.
template <class A>
void pack_token(typename A::Warp& w, const DispatchParams& p, const CrossingLayout& at, const int* host_of, int host, int64_t t,
                std::byte* slot) {
  if (at.headers) {
    const SendEntry* const entries = p.tables.sends.of(t);
    auto* const places = reinterpret_cast<SendEntry*>(slot + at.places_at());
    int n = 0;
    for (int i = 0; i < p.tables.sends.places(t); ++i)
      if (entries[i].rank >= 0 && host_of[entries[i].rank] == host) places[n++] = entries[i];
    *reinterpret_cast<CrossingHead*>(slot) = {t, n};
    for (; n < at.max_places; ++n) places[n] = {-1, -1, -1};
    const int64_t f = t * at.topk;
    const auto routes = 4 * static_cast<size_t>(at.topk);
    A::copy(w, slot + at.ids_at(), p.tables.ids + f, routes);
    if (at.expert_major) A::copy(w, slot + at.rows_at(), p.tables.route_row + f, routes);
    if (at.weights) A::copy(w, slot + at.weights_at(), p.shape.weights + f, routes);
  }
  std::byte *const row = slot + at.row_at(), *const scale = slot + at.scale_at();
  const std::byte* const x = p.shape.x + t * p.shape.src_row_bytes;
  if (p.shape.quantize != ScaleKind::none) {
    A::quantize_row(w, reinterpret_cast<uint8_t*>(row), scale, x, p.shape.src_type, p.shape.hidden, p.shape.quantize);
    return;
  }
  A::copy(w, row, x, static_cast<size_t>(at.row_bytes));
  if (p.shape.scales) A::copy(w, scale, p.shape.scales + t * at.scale_bytes, static_cast<size_t>(at.scale_bytes));
}

/// Proxy side: stores the head of crossing row `slot` under token number i.
template <class A>
void keep_token(typename A::Warp& w, const CrossingLayout& at, const std::byte* slot, int64_t i, CrossedTokens& to) {
  const auto number = static_cast<size_t>(i), routes = number * static_cast<size_t>(at.topk);
  to.token[number] = static_cast<int32_t>(reinterpret_cast<const CrossingHead*>(slot)->token);
  const auto of_routes = 4 * static_cast<size_t>(at.topk);
  A::copy(w, to.sends.data() + number * static_cast<size_t>(to.stride), slot + at.places_at(),
          sizeof(SendEntry) * static_cast<size_t>(to.stride));
  A::copy(w, to.ids.data() + routes, slot + at.ids_at(), of_routes);
  if (at.expert_major) A::copy(w, to.route_row.data() + routes, slot + at.rows_at(), of_routes);
  if (at.weights) A::copy(w, to.weights.data() + routes, slot + at.weights_at(), of_routes);
  A::settle(w);  // the tables are read to send the row
}

/// The rounds of a dispatch (rounds.hpp, Steps).
template <class A>
class CrossingSteps {
 public:
  CrossingSteps(const HostDispatchParams& p, MoveCounter& moved) : p_(p), moved_(moved) {}

  bool pack(typename A::Warp& w, int64_t k, WorkQueue<A>& items) {
    WarpSpan<A> span(w, call(), Event::pack_rows);
    int64_t rows = 0;
    for (;; items.done(), ++rows) {
      const Located at = A::locate(w, items.item(w), p_.num_rails, [&](int i) { return p_.rails[i].out.in_round(k); });
      if (at.segment == p_.num_rails) break;
      const DispatchRail& rail = p_.rails[at.segment];
      const CrossingLayout& layout = rail.out.layout;
      pack_token<A>(w, p_.move, layout, p_.host_of, rail.host, rail.leaving[rail.out.begin(k) + at.offset],
                    rail.out.slot(k) + at.offset * layout.bytes());
      moved_.network_bytes += static_cast<uint64_t>(layout.row_bytes + layout.scale_bytes);
      moved_.metadata_bytes += static_cast<uint64_t>(layout.row_at());
    }
    A::settle(w);
    span.set_arg(rows);  // their bytes are counted when rows are sent to ranks
    return true;
  }
  void packed(typename A::Warp&, int64_t) {}

  std::span<const PeerTransfer> transfers(int64_t k) {
    for (int i = 0; i < p_.num_rails; ++i) {
      const DispatchRail& rail = p_.rails[i];
      p_.transfers[i] = {rail.peer,
                         {rail.out.slot(k), static_cast<size_t>(rail.out.bytes(k))},
                         {rail.in.slot(k), static_cast<size_t>(rail.in.bytes(k))}};
    }
    return {p_.transfers, static_cast<size_t>(p_.num_rails)};
  }

  bool take(typename A::Warp& w, int64_t k, WorkQueue<A>& items) {
    WarpSpan<A> span(w, call(), Event::forward_rows);
    int64_t rows = 0;
    for (;; items.done(), ++rows) {
      const Located at = A::locate(w, items.item(w), p_.num_rails, [&](int i) { return p_.rails[i].in.in_round(k); });
      if (at.segment == p_.num_rails) break;
      const DispatchRail& rail = p_.rails[at.segment];
      forward(w, rail, rail.in.begin(k) + at.offset, rail.in.slot(k) + at.offset * rail.in.layout.bytes());
    }
    A::settle(w);
    span.set_arg(rows);
    return true;
  }
  void took(typename A::Warp& w, int64_t k) {
    for (int i = 0; i < p_.num_rails; ++i)
      if (p_.rails[i].is_proxy_of_peer) announce_rows(w, p_.rails[i], p_.rails[i].in.begin(k), p_.rails[i].in.begin(k + 1));
  }
  /// Announces the rows of sources with no tokens crossing to this host, because nothing else announces them. Call from one
  /// warp.
  void announce_empty(typename A::Warp& w) {
    for (int i = 0; i < p_.num_rails; ++i)
      if (p_.rails[i].is_proxy_of_peer && p_.rails[i].in.count == 0) announce_rows(w, p_.rails[i], 0, 0);
  }

 private:
  const CallContext& call() const { return p_.move.call; }

  /// Forwards token number `i` of a source from its slot.
  void forward(typename A::Warp& w, const DispatchRail& rail, int64_t i, const std::byte* slot) {
    const DispatchParams& p = rail.forward;
    const CrossingLayout& at = rail.in.layout;
    if (at.headers) keep_token<A>(w, at, slot, i, *rail.crossed);
    const SendEntry* const entries = p.tables.sends.of(i);
    const int places = p.tables.sends.places(i);
    if (at.headers) send_records<A>(w, p, i, rail.crossed->token[static_cast<size_t>(i)], entries, places);
    if (A::lanes_where(w, places, [&](int n) { return has_row(entries[n]); }) == 0) return;
    send_row<A>(w, p, entries, places, slot + at.row_at(), at.scale_bytes > 0 ? slot + at.scale_at() : nullptr);
  }

  /// Call after tokens number [begin, end) of a source have been forwarded; sets the source's `rows` flags for the chunks that
  /// are now complete.
  void announce_rows(typename A::Warp& w, DispatchRail& rail, int64_t begin, int64_t end) {
    const CrossedTokens& crossed = *rail.crossed;
    const auto stride = static_cast<int64_t>(crossed.stride);
    for (int64_t n = begin * stride; n < end * stride; ++n)
      if (const int rank = crossed.sends[static_cast<size_t>(n)].rank; rank >= 0) ++rail.announced_records[rank];
    const bool in_chunks = p_.move.shape.layout == Layout::expert_major;
    const int chunks = in_chunks ? kRowChunks : 1;
    const bool all = end == rail.in.count;
    const int64_t known = all || end == 0 ? 0 : crossed.token[static_cast<size_t>(end) - 1] + 1;
    for (; rail.announced_chunks < chunks; ++rail.announced_chunks) {
      const int c = rail.announced_chunks;
      if (!all && (!in_chunks || row_chunk_end(rail.source_tokens, c) > known)) return;
      A::template publish_to<Scope::system>(
          w, call().world(),
          [&](int r) {
            const auto records = in_chunks ? static_cast<uint64_t>(rail.announced_records[r]) : 0;
            return FlagStore{reach<A>(call().heap, r, p_.move.shape.control.rows_flag(rail.peer, c)),
                             flag_word(call().epoch, records)};
          },
          Site::rows);
    }
  }

  const HostDispatchParams& p_;
  MoveCounter& moved_;
};

/// Sends this rank's rows for the ranks of its host, using all warps, like dispatch_direct.
template <class A>
SWITCHYARD_FN void send_own_rows(typename A::Warp& w, const DispatchParams& p, int last, MoveCounter& moved) {
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
}

/// Kernel body: dispatch_direct for a group that spans several hosts.
template <class A>
bool dispatch_hosts(typename A::Warp& w, const HostDispatchParams& h) {
  const DispatchParams& p = h.move;
  const bool expert_major = p.shape.layout == Layout::expert_major;
  const int last = expert_major ? kRowChunks - 1 : 0;
  MoveCounter moved;
  CrossingSteps<A> steps(h, moved);
  if (!begin_rounds<A>(w, p.call, h.rounds, steps)) return false;
  send_own_rows<A>(w, p, last, moved);
  const Destination mine = destination(p, p.call.rank());
  {
    const WarpSpan<A> span(w, p.call, Event::zero_padding, p.tables.num_padding);
    zero_padding<A>(w, p, mine, share_of_blocks(w, 0, w.num_blocks()));
  }
  if (w.index() == 0) steps.announce_empty(w);
  if (!finish_rounds<A>(w, p.call, h.rounds, steps)) return false;
  PlaceQueue<A> queue{WorkQueue<A>(p.work.places_next, PlaceQueue<A>::kBatch)};
  for (int c = 0; expert_major && c <= last; ++c)
    if (!take_chunk<A>(w, p, mine, c, queue, moved)) return false;
  A::settle(w);
  p.call.moved[w.index()] = moved;
  return expert_major || w.index() != 0 || wait_rows<A>(w, p, last);
}

}  // namespace switchyard::detail

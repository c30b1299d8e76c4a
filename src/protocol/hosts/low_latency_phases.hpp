// SPDX-License-Identifier: Apache-2.0
// Low-latency mode across several hosts in phases, run by CPU workers and by kernels, with rounds between them.
// low_latency_forward.hpp and low_latency_returns.hpp define the messages and their writers.
//
//   dispatch   pack_crossing, low_latency_send  -- round -->  forward_crossing_tokens, low_latency_receive
//   combine    low_latency_return, collect_returned  -- round -->  announce_entered, low_latency_sum
//
// On CPUs, a combine's rows cross in several rounds and its headers in a round of their own, which replaces announce_entered.
//
// Both ends know the sizes without communication. A dispatch has a fixed place for each of the maximum number of tokens per
// rank. Returned rows are ordered by token. On CPUs, both ends know the experts of the tokens, and rows are packed without
// gaps. On GPUs, sizes are part of a graph, and each token has room for `max` rows. Places of absent tokens and rows are not
// read.
//
// | flag         | written by                       | read by           | order           | scope  | reuse                    |
// | call_header  | each rank and its proxies        | all ranks         | release/acquire | system | epoch; two sets          |
// | expert_count | each rank and its proxies        | the expert's rank | none            | system | epoch; two sets          |
// | message      | a source's block or proxy's warp | receiver's warps  | release/acquire | system | epoch; two sets          |
// | returned     | a warp of an expert's rank       | owner's proxy     | none            | system | zeroed when read; 2 sets |
//
// Buffers: a round's send and receive buffers have the same addresses in every call, because they are part of a graph. They are
// written and read in stream order. Progress: a phase after a round waits for phases of this host's ranks that precede the same
// round or follow it; collect_returned waits for rows that these ranks send before they wait.
#pragma once

#include "protocol/hosts/low_latency_forward.hpp"
#include "protocol/hosts/low_latency_returns.hpp"

namespace switchyard::detail {

/// A rank on another host with which this rank exchanges rows.
struct RemoteRail {
  int rank = -1, host = -1;
  int peer_is_my_proxy = 0, is_proxy_of_peer = 0;
  int source = -1;     ///< index among the ranks whose proxy is this rank, if it is one of them
  int host_ranks = 0;  ///< number of ranks on the peer's host
};

/// One rank's data about other hosts, for all calls on an object. Trivially copyable; pointers refer to this rank's private
/// memory.
struct RemoteRails {
  const RemoteRail* rails = nullptr;  ///< [num_rails]
  const int* host_of = nullptr;       ///< [W]
  const int* rail_of_host = nullptr;  ///< [hosts] rail of this rank's proxy there; -1: this rank's host
  int num_rails = 0;
  int own_host = 0, own_ranks = 1;
  // Messages of the rails, `stride` bytes apart. A dispatch sends a single message, at the start of `sent`, over all rails.
  std::byte* sent = nullptr;
  std::byte* received = nullptr;
  int64_t stride = 0;

  SWITCHYARD_FN std::byte* out(int rail) const { return sent + rail * stride; }
  SWITCHYARD_FN std::byte* in(int rail) const { return received + rail * stride; }
};

/// End of a message's head, where its contents begin.
inline constexpr int64_t kRailHeadBytes = 128;
static_assert(sizeof(RelayHead) <= kRailHeadBytes);

/// A dispatch message: its head, whose number is the header of the call; row counts for each expert; and its tokens, each in a
/// separate slot. A token's row is present only if the token crosses.
struct DispatchRound {
  CrossingMessage at;
  int64_t tokens_at, bytes;

  explicit SWITCHYARD_FN DispatchRound(const LowLatencyLayout& l)
      : at(l),
        tokens_at(round_up(kRailHeadBytes + int64_t{l.map.experts} * 4, 128)),
        bytes(tokens_at + int64_t{l.max_tokens} * at.bytes) {}
  static SWITCHYARD_FN int32_t* counts(std::byte* message) { return reinterpret_cast<int32_t*>(message + kRailHeadBytes); }
  SWITCHYARD_FN std::byte* slot(std::byte* message, int t) const { return message + tokens_at + int64_t{t} * at.bytes; }
};

struct TokenRange {
  int64_t begin, end;
};
/// The tokens, of `tokens`, whose rows cross in round k.
SWITCHYARD_FN inline TokenRange tokens_of_round(int64_t k, int64_t per_round, int64_t tokens) {
  const int64_t begin = k * per_round, end = begin + per_round;
  return {begin < tokens ? begin : tokens, end < tokens ? end : tokens};
}

/// Bit mask of a token's slots whose rows cross, and the number of crossing rows of all tokens before it.
struct CrossingSlots {
  uint64_t slots;
  int64_t before;
};

/// A combine message. To a proxy of this rank, it contains its head, whose number is the header of the call. To a rank whose
/// proxy is this rank, it contains the rows of that rank's tokens.
struct CombineRound {
  int max;  ///< maximum rows per token
  bool per_rank;
  int64_t row_stride;
  const CrossingSlots* of_token;  ///< [tokens + 1]; null: `max` places per token

  /// For messages from a host with `ranks` ranks.
  SWITCHYARD_FN CombineRound(CombineOrder order, int topk, int64_t row_bytes, int ranks,
                             const CrossingSlots* rows_of_token = nullptr)
      : max(order == CombineOrder::per_route || topk < ranks ? topk : ranks),
        per_rank(order == CombineOrder::per_rank),
        row_stride(round_up(row_bytes, 16)),
        of_token(rows_of_token) {}
  SWITCHYARD_FN int64_t rows(int64_t tokens) const { return of_token != nullptr ? of_token[tokens].before : tokens * max; }
  SWITCHYARD_FN int64_t bytes(int64_t tokens) const { return kRailHeadBytes + rows(tokens) * row_stride; }
  /// Tokens per round of at most `round_bytes` bytes of rows; at least one. 0 bytes: all tokens in one round.
  SWITCHYARD_FN int64_t tokens_per_round(int64_t round_bytes) const {
    if (round_bytes == 0) return int64_t{1} << 31;
    const int64_t tokens = round_bytes / (max * row_stride);
    return tokens > 1 ? tokens : 1;
  }
  /// Place of the row for slot `slot` of token t. `slots`: bit mask of the token's slots whose rows cross.
  SWITCHYARD_FN std::byte* row(std::byte* message, int t, uint64_t slots, int slot) const {
    const int n = per_rank || of_token != nullptr ? bits(slots & ((uint64_t{1} << slot) - 1)) : slot;
    return message + bytes(t) + n * row_stride;
  }
};

/// Data that a dispatch into an output stores for its combine, for the ranks that use this rank as their proxy.
struct CrossedIds {
  int32_t* ids = nullptr;  ///< [sources, max_tokens, K]

  SWITCHYARD_FN int32_t* of(const LowLatencyLayout& l, int source, int t) const {
    return ids + (int64_t{source} * l.max_tokens + t) * l.topk;
  }
};

/// RemoteCombineParams for the phases.
struct PhasedCombineParams : RemoteCombineParams {
  RemoteRails rails;
  CrossedIds crossed;
  /// CPU: CombineRound::of_token of the messages of each rail, sent and received: [num_rails, 2, max_tokens + 1].
  const CrossingSlots* placed = nullptr;
  int64_t round_bytes = 0;  ///< CPU: CombineRound::tokens_per_round; 0: one round

  SWITCHYARD_FN const CrossingSlots* placed_of(int rail, bool received) const {
    return placed != nullptr ? placed + (rail * 2 + (received ? 1 : 0)) * (int64_t{layout.max_tokens} + 1) : nullptr;
  }
  /// The messages that this rank sends as a proxy, and those that another host's proxy sends to this rank. On GPUs,
  /// received() may be called only in kernels.
  SWITCHYARD_FN CombineRound sent(int rail) const {
    return {order, layout.topk, row_bytes, rails.own_ranks, placed_of(rail, false)};
  }
  SWITCHYARD_FN CombineRound received(int rail) const {
    return {order, layout.topk, row_bytes, rails.rails[rail].host_ranks, placed_of(rail, true)};
  }
};

/// Writes the head of a message of this call.
template <class A>
SWITCHYARD_FN void write_head(typename A::Warp& w, const CallContext& call, std::byte* message, uint64_t header) {
  A::for_lanes(w, 1, [&](int) {
    *reinterpret_cast<RelayHead*>(message) = {call.word(), static_cast<uint64_t>(call.operation), static_cast<int64_t>(header),
                                              0};
  });
}
/// Returns true if the message that arrived over a rail belongs to this call. Otherwise, records a mismatch and returns false.
template <class A>
SWITCHYARD_FN bool is_of_call(typename A::Warp& w, const CallContext& call, const RemoteRails& remote, int rail) {
  const RelayHead& head = *reinterpret_cast<const RelayHead*>(remote.in(rail));
  if (head.call == call.word() && head.operation == static_cast<uint64_t>(call.operation)) return true;
  return record_mismatch<A>(w, call, Site::network, remote.rails[rail].rank);
}
SWITCHYARD_FN inline uint64_t header_in(const RemoteRails& remote, int rail) {
  return static_cast<uint64_t>(reinterpret_cast<const RelayHead*>(remote.in(rail))->number);
}

// ---- dispatch ----

/// Writes the entries of all choices of token t. Settled.
template <class A, class P>
SWITCHYARD_FN void pack_entries(typename A::Warp& w, const P& p, int t, LowLatencyEntry* to) {
  const int topk = p.layout.topk, begin = t * topk;
  auto* const counted = reinterpret_cast<int32_t*>(w.scratch());
  if (!p.sets.ready()) {
    for (int k = 0; k < topk; ++k) {
      const int32_t expert = p.ids(begin + k);
      const int32_t n = expert >= 0 ? tokens_choosing<A>(w, p, t, expert) : 0;
      A::for_lanes(w, 1, [&](int) { counted[k] = n; });
    }
    A::settle(w);
  }
  A::for_lanes(w, topk, [&](int k) {
    to[k] = make_entry(p, begin, k, [&](int32_t expert) { return p.sets.ready() ? p.sets.count(expert, t) : counted[k]; });
  });
  A::settle(w);
}

/// Writes some columns of token t's row, and their scales, in the format in which they are sent. The writes are pending on
/// return.
template <class A, class P>
SWITCHYARD_FN void pack_columns(typename A::Warp& w, const P& p, int t, const ColumnRange& range, std::byte* slot) {
  const std::byte* const row = p.x + int64_t{t} * p.src_row_bytes;
  std::byte *const to = slot + range.payload_at, *const scales = slot + p.layout.scales_at() + range.scale_at;
  if (p.quantize != ScaleKind::none) {
    A::quantize_to(
        w, 1,
        [=](int) {
          return QuantizedRow{reinterpret_cast<uint8_t*>(to), scales};
        },
        row + dtype_bytes(p.src_type, range.column), p.src_type, range.columns, p.quantize, p.scale_group);
    return;
  }
  A::copy(w, to, row + range.payload_at, static_cast<size_t>(range.payload_bytes));
  if (p.scales != nullptr)
    A::copy(w, scales, p.scales + int64_t{t} * p.src_scale_bytes + range.scale_at, static_cast<size_t>(range.scale_bytes));
}

/// Source: packs the data that a dispatch sends to other hosts. Call from all warps; does not wait. \returns bytes of this
/// warp's crossing rows, counted once per host
template <class A, class P>
SWITCHYARD_FN uint64_t pack_crossing(typename A::Warp& w, const P& p, const RemoteRails& remote) {
  const WarpSpan<A> span(w, p.call, Event::pack_rows);
  const auto& l = p.layout;
  const DispatchRound round(l);
  if (is_announcer(w)) write_head<A>(w, p.call, remote.sent, dispatch_header(p));
  int32_t* const counts = DispatchRound::counts(remote.sent);
  for (int64_t e = spread_index(w); e < l.map.experts; e += w.total()) {
    const int n = tokens_choosing<A>(w, p, p.tokens, static_cast<int32_t>(e));
    A::for_lanes(w, 1, [&](int) { counts[e] = n; });
  }
  uint64_t bytes = 0;
  const auto parts = static_cast<uint32_t>(p.parts), items = static_cast<uint32_t>(p.tokens) * parts;
  for (auto i = static_cast<uint32_t>(spread_index(w)); i < items; i += static_cast<uint32_t>(w.total())) {
    const uint32_t token = i / parts;
    const int t = static_cast<int>(token), part = static_cast<int>(i - token * parts), begin = t * l.topk;
    std::byte* const slot = round.slot(remote.sent, t);
    if (part == 0) pack_entries<A>(w, p, t, reinterpret_cast<LowLatencyEntry*>(slot + round.at.entries_at));
    const uint64_t hosts = A::lanes_union(w, l.topk, [&](int k) {
      const int32_t expert = p.ids(begin + k);
      const int host = expert >= 0 ? remote.host_of[l.owner(expert)] : remote.own_host;
      return host == remote.own_host ? uint64_t{0} : uint64_t{1} << host;
    });
    const ColumnRange range = column_range(p, part, p.part_columns);
    if (hosts == 0 || range.columns == 0) continue;
    pack_columns<A>(w, p, t, range, slot);
    A::settle(w);
    bytes += static_cast<uint64_t>(range.payload_bytes + range.scale_bytes) * static_cast<uint64_t>(bits(hosts));
  }
  A::settle(w);
  return bytes;
}

/// Proxy: announces the messages from the ranks that use this proxy to the ranks of this host, forwards their tokens, and
/// stores the data needed by their combine. Call from all warps; does not wait. Returns false after recording a fault.
template <class A, class P>
SWITCHYARD_FN bool forward_crossing_tokens(typename A::Warp& w, const P& p, const RemoteRails& remote,
                                           const CrossedIds& crossed) {
  const WarpSpan<A> span(w, p.call, Event::forward_rows);
  const auto& l = p.layout;
  const DispatchRound round(l);
  for (int rail = 0; rail < remote.num_rails; ++rail) {
    const RemoteRail& from = remote.rails[rail];
    if (from.is_proxy_of_peer == 0) continue;
    if (!is_of_call<A>(w, p.call, remote, rail)) return false;
    const int32_t* const counts = DispatchRound::counts(remote.in(rail));
    for (int64_t e = spread_index(w); e < l.map.experts; e += w.total()) {
      const auto expert = static_cast<int32_t>(e);
      const int owner = l.owner(expert);
      if (!is_mapped<A>(p.call.heap, owner)) continue;
      A::post(w, p.call.heap.at(owner, l.expert_count(p.call.epoch, expert - l.first_expert(owner), from.rank)),
              flag_word(p.call.epoch, static_cast<uint64_t>(counts[e])));
    }
    if (is_announcer(w)) publish_header_of<A>(w, p.call, l, from.rank, header_in(remote, rail));
  }
  const auto units = [&](int rail) {
    const int64_t tokens = tokens_in(header_in(remote, rail));
    return remote.rails[rail].is_proxy_of_peer != 0 ? tokens * l.units_per_token() : 0;
  };
  for (int64_t i = spread_index(w);; i += w.total()) {
    const Located at = A::locate(w, i, remote.num_rails, units);
    if (at.segment == remote.num_rails) break;
    const RemoteRail& from = remote.rails[at.segment];
    const int unit = static_cast<int>(at.offset), t = l.token_of(unit);
    std::byte* const slot = round.slot(remote.in(at.segment), t);
    const LowLatencyEntry* const entries = round.at.entries(slot);
    if (l.first_k_of(unit) == 0) {
      int32_t* const ids = crossed.of(l, from.source, t);
      A::for_lanes(w, l.topk, [&](int k) { ids[k] = entries[k].expert; });
    }
    forward_unit<A>(w, p, from.rank, unit, slot, entries);
  }
  A::settle(w);
  return true;
}

// ---- combine ----

/// Announces the call to this rank's proxies. Part of the sending half; call from one warp.
template <class A>
SWITCHYARD_FN void write_combine_heads(typename A::Warp& w, const PhasedCombineParams& p) {
  for (int rail = 0; rail < p.rails.num_rails; ++rail)
    if (p.rails.rails[rail].peer_is_my_proxy != 0) write_head<A>(w, p.call, p.rails.out(rail), p.header());
  A::settle(w);
}

/// wait_entered() for the ranks of this host.
template <class A>
SWITCHYARD_FN bool wait_entered_local(typename A::Warp& w, const PhasedCombineParams& p) {
  const CallContext& call = p.call;
  const uint64_t value = p.header();
  WarpSpan<A> span(w, call, Event::wait_entered, -1);
  const auto here = [&](int r) { return is_mapped<A>(call.heap, r) ? r : call.rank(); };
  const auto header = [&](int r) { return call.heap.local(p.layout.header(call.epoch, here(r))); };
  if (!wait_for<A>(w, call, call.world(), header, call.word(), Site::call_header, here, span)) return false;
  const uint64_t others = A::lanes_where(w, call.world(), [&](int r) { return flag_value(*header(r)) != value; });
  if (others == 0) return true;
  const int other = nth_bit(others, 0);
  return A::out_of_line(w, RecordMismatch<A>{}, &call, other, value, flag_value(*header(other)));
}

/// Proxy: collects the rows of round `round` that the ranks of this host return for tokens of the ranks that use this proxy.
/// Call from all warps, after this rank has returned its own rows. Returns false after recording a fault.
template <class A>
SWITCHYARD_FN bool collect_returned(typename A::Warp& w, const PhasedCombineParams& p, int64_t round) {
  if (!wait_entered_local<A>(w, p)) return false;
  const WarpSpan<A> span(w, p.call, Event::pack_rows);
  const auto& l = p.layout;
  const RemoteRails& remote = p.rails;
  const bool per_rank = p.order == CombineOrder::per_rank;
  const int max = p.sent(0).max;
  const int64_t per_round = p.sent(0).tokens_per_round(p.round_bytes);
  const auto range = [&](int rail) { return tokens_of_round(round, per_round, p.source_tokens[remote.rails[rail].rank]); };
  const auto items = [&](int rail) {
    if (remote.rails[rail].is_proxy_of_peer == 0) return int64_t{0};
    const TokenRange tokens = range(rail);
    return (tokens.end - tokens.begin) * max * l.pieces;
  };
  for (int64_t i = spread_index(w);; i += w.total()) {
    const Located found = A::locate(w, i, remote.num_rails, items);
    if (found.segment == remote.num_rails) break;
    const RemoteRail& to = remote.rails[found.segment];
    const ItemPiece at = split_index(found.offset, l);
    const int in_range = static_cast<int>(at.item) / max, n = static_cast<int>(at.item) - in_range * max;
    const int t = static_cast<int>(range(found.segment).begin) + in_range;
    const int32_t* const ids = p.crossed.of(l, to.source, t);
    const CombineRound sent = p.sent(found.segment);
    const uint64_t slots = sent.of_token != nullptr
                               ? sent.of_token[t].slots
                               : slots_from(
                                     l, p.order, [ids](int k) { return ids[k]; }, remote.host_of, remote.own_host);
    if (per_rank ? n >= bits(slots) : (slots >> n & 1) == 0) continue;
    const int slot = per_rank ? nth_bit(slots, n) : n;
    const int column = static_cast<int>(dtype_bytes(p.type, l.column(at.piece))),
              bytes = static_cast<int>(dtype_bytes(p.type, l.column(at.piece + 1))) - column;
    if (!collect_row<A>(w, p, to.rank, t, slot, per_rank ? slot : l.owner(ids[slot]), column, static_cast<size_t>(bytes),
                        sent.row(remote.out(found.segment), t, slots, slot) + column, static_cast<size_t>(round_up(bytes, 16))))
      return false;
  }
  A::settle(w);
  return true;
}

/// Proxy: checks that the received rounds belong to this call. Call from one warp. Returns false after recording a fault.
template <class A>
SWITCHYARD_FN bool check_returned(typename A::Warp& w, const PhasedCombineParams& p) {
  for (int rail = 0; rail < p.rails.num_rails; ++rail)
    if (p.rails.rails[rail].is_proxy_of_peer != 0 && !is_of_call<A>(w, p.call, p.rails, rail)) return false;
  return true;
}

/// check_returned(), which also announces to the ranks of this host that the ranks that use this proxy have entered the call.
/// For backends whose headers do not cross in a round of their own.
template <class A>
SWITCHYARD_FN bool announce_entered(typename A::Warp& w, const PhasedCombineParams& p) {
  for (int rail = 0; rail < p.rails.num_rails; ++rail) {
    const RemoteRail& from = p.rails.rails[rail];
    if (from.is_proxy_of_peer == 0) continue;
    if (!is_of_call<A>(w, p.call, p.rails, rail)) return false;
    publish_header_of<A>(w, p.call, p.layout, from.rank, header_in(p.rails, rail));
  }
  return true;
}

/// For returned_row: the address at which a round delivered the row returned for slot `slot` of token t; null if a rank of this
/// host pushes it.
template <class Ids>
SWITCHYARD_FN const std::byte* row_in_round(const PhasedCombineParams& p, const Ids& all_ids, int t, int slot) {
  const auto& l = p.layout;
  const auto id = [&](int k) { return all_ids(t * l.topk + k); };
  const bool per_rank = p.order == CombineOrder::per_rank;
  const int host = p.rails.host_of[per_rank ? slot : l.owner(id(slot))];
  if (host == p.rails.own_host) return nullptr;
  const int rail = p.rails.rail_of_host[host];
  const CombineRound round = p.received(rail);
  uint64_t slots = 0;  // unused if each slot has a place
  if (round.of_token != nullptr)
    slots = round.of_token[t].slots;
  else if (per_rank)
    slots = slots_from(l, p.order, id, p.rails.host_of, host);
  return round.row(p.rails.in(rail), t, slots, slot);
}

/// Owner: number of row bytes that arrived from other hosts for this warp's share of the tokens.
template <class A>
SWITCHYARD_FN uint64_t returned_bytes(typename A::Warp& w, const PhasedCombineParams& p) {
  const auto& l = p.layout;
  uint64_t rows = 0;
  for (int64_t t = w.index(); t < p.own->tokens; t += w.total()) {
    const int32_t* const ids = p.own_ids + t * l.topk;
    const auto crosses = [&](int k) { return ids[k] >= 0 && p.rails.host_of[l.owner(ids[k])] != p.rails.own_host; };
    if (p.order == CombineOrder::per_rank) {
      rows += static_cast<uint64_t>(
          bits(A::lanes_union(w, l.topk, [&](int k) { return crosses(k) ? uint64_t{1} << l.owner(ids[k]) : uint64_t{0}; })));
      continue;
    }
    rows += static_cast<uint64_t>(bits(A::lanes_where(w, l.topk, [&](int64_t k) {
      bool repeats = false;
      for (int64_t g = 0; g < k; ++g) repeats |= ids[g] == ids[k];
      return !repeats && crosses(static_cast<int>(k));
    })));
  }
  return rows * static_cast<uint64_t>(p.row_bytes);
}

}  // namespace switchyard::detail

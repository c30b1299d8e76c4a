// SPDX-License-Identifier: Apache-2.0
// Phases of a combine across several hosts, run by CPU workers and by kernels. On each other host, the proxy of a token's owner
// reads the token's rows there, as an owner does on its own host. It returns them in rounds of the owner's tokens: the exact
// rows (per_rank, per_route) or their sum (per_host). The owner adds the rows of its own host and the returned rows. Rows that
// peers on the host cannot read in place are copied first, or summed first in a per_rank combine of expert-major rows
// (combine_copies.hpp, combine_sums.hpp).
//
//   cut_rounds                                   once all placements have arrived
//   make_rows                                    rows that others cannot read in place
//   give_rows(k) -- round k --> add_rows(k)      for each round k, three of them in flight
//
// A message contains the rows of its tokens without gaps. Both ends know its size from ReturnCounts in their handles.
//
// | flag    | written by                               | read by            | order           | scope  | reuse              |
// | outputs | ranks that copy or sum, each chunk       | owners and proxies | release/acquire | system | epoch, never reset |
// | pulled  | owner's, or its proxy's, last warp       | expert's warp 0    | release/acquire | system | epoch, never reset |
//
// Before make_rows, all placements have been exchanged and agree. All warps of a rank run a phase before any of them runs the
// next one. Buffers: a slot is packed again once its round has been sent, and receives again once its rows have been added.
// Progress: make_rows never waits; give_rows and add_rows wait for `outputs` from ranks of this host; the wait for `pulled` is
// last.
#pragma once

#include "plan/hosts.hpp"
#include "protocol/hosts/message.hpp"
#include "protocol/normal/combine_copies.hpp"

namespace switchyard::detail {

/// Start of a round: its first token (owner) or first number (proxy), and the number of rows of all tokens before it.
struct RoundCut {
  int64_t item;
  int64_t rows;
};

/// Rows that one rank returns for an owner's tokens. Rows are `stride` bytes long and end with the token's weights if the owner
/// takes weights. A round covers `tokens_per_round` of the owner's tokens and contains their rows in order.
struct ReturnedTokens {
  ReturnKind kind = ReturnKind::per_rank;
  ReturnCounts counts;
  int64_t tokens = 0;  ///< of the owner
  int64_t tokens_per_round = 1;
  int64_t stride = 0;
  bool weights = false;
  RoundCut* cuts = nullptr;    ///< [rounds() + 1] see cut_rounds()
  std::byte* slots = nullptr;  ///< [kRoundSlots] of slot_bytes
  int64_t slot_bytes = 0;

  SWITCHYARD_FN int64_t rounds() const { return (tokens + tokens_per_round - 1) / tokens_per_round; }
  SWITCHYARD_FN int64_t first_token(int64_t k) const { return k * tokens_per_round < tokens ? k * tokens_per_round : tokens; }
  SWITCHYARD_FN std::byte* slot(int64_t k) const { return slots + k % kRoundSlots * slot_bytes; }
  /// Address of the first row of item i, which belongs to round k.
  SWITCHYARD_FN std::byte* row(int64_t k, int64_t i) const {
    return slot(k) + (counts.before(kind, i) - cuts[k].rows) * stride;
  }
};

/// Bytes of a returned row in a combine of `shape`, with or without weights.
SWITCHYARD_FN inline int64_t returned_stride(const SumShape& shape, bool weights) {
  return shape.row_bytes + (weights ? round_up(int64_t{4} * shape.topk, 16) : 0);
}
SWITCHYARD_FN inline ReturnKind return_kind_of(const SumShape& shape) {
  if (shape.order == CombineOrder::per_host) return ReturnKind::per_host;
  return shape.order == CombineOrder::per_route ? ReturnKind::per_route : ReturnKind::per_rank;
}

/// Both directions of one rail in a combine. Trivially copyable; pointers refer to this rank's private memory.
struct CombineRail {
  int peer = -1;
  bool is_proxy_of_peer = false;  ///< `out` is sent to the peer, for its tokens
  int64_t count = 0;              ///< crossing tokens of the peer
  CrossedTables crossed;
  bool weighted = false;  ///< rows are multiplied by crossed.weights
  ReturnedTokens out;
  bool peer_is_my_proxy = false;  ///< `in` is received from the peer
  ReturnedTokens in;
  uint64_t* arrivals = nullptr;  ///< number of warps that have finished a phase; 0 between phases

  /// True if the peer's rows on this host have been read after round k.
  SWITCHYARD_FN bool ends_with(int64_t k) const {
    const int64_t rounds = out.rounds();
    return is_proxy_of_peer && k + 1 == (rounds > 1 ? rounds : 1);
  }
};

/// Rows returned to an owner by all hosts. Trivially copyable; pointers refer to this rank's private memory.
struct ReturningHosts {
  const ReturnedTokens* rows = nullptr;  ///< [hosts]; unused for this host
  const int32_t* host_of = nullptr;      ///< [W]
  int hosts = 1, own_host = 0;
  int64_t rounds = 1;            ///< of the call: the last round ends it
  std::byte* scratch = nullptr;  ///< per_host: scratch_stride bytes for each warp, or null: the scratch of the warps
  int64_t scratch_stride = 0;
};

/// Address of the row at place i of token t on this host, and of its weights; null if there is none.
SWITCHYARD_FN inline const std::byte* local_row(const CombineParams& p, const TokenRows& rows, int i) {
  const int rank = rows.rank(i);
  const Placement& place = *p.call.heap.local(p.shape.control.placement(p.call.epoch, rank));
  const int64_t at = rows.by_route ? p.tables.route_row[rows.first_route + i] : rows.entries[i].record;
  return offered(p.call.heap, rank, place.rows) + at * p.shape.row_bytes;
}
SWITCHYARD_FN inline const std::byte* local_weights(const CombineParams& p, const TokenRows& rows, int i) {
  const int rank = rows.rank(i);
  const Placement& place = *p.call.heap.local(p.shape.control.placement(p.call.epoch, rank));
  if (place.pull.gives_weights == 0) return nullptr;  // a mismatch, which is reported after the call
  return p.call.heap.base[rank] + place.pull.weights + int64_t{4} * p.shape.topk * rows.entries[i].record;
}

/// Sums the rows of token t on this host to `out`, starting from +0 and in the order defined by the contract, and their weights
/// to `out_weights` unless it is null. The writes are pending on return. Returns false if there are no rows.
template <class A>
SWITCHYARD_FN bool sum_local(typename A::Warp& w, const CombineParams& p, int64_t t, std::byte* out, std::byte* out_weights) {
  const TokenRows rows = rows_of(p, t);
  const auto here = [&](int i) { return rows.rank(i) >= 0 && is_mapped<A>(p.call.heap, rows.rank(i)); };
  if (A::lanes_where(w, rows.places, here) == 0) return false;
  A::template reduce_rows_from<kMaxTopk>(
      w, ReduceSpec{out, nullptr, nullptr, 0, {nullptr, nullptr}, p.shape.type, p.shape.hidden}, rows.places,
      rows.by_route && p.weights, [&](int i) -> const void* { return here(i) ? local_row(p, rows, i) : nullptr; },
      [&](int i) { return p.weights[t * p.shape.topk + i]; });
  if (!out_weights) return true;
  A::template reduce_rows_from<kMaxTopk>(
      w, ReduceSpec{out_weights, nullptr, nullptr, 0, {nullptr, nullptr}, DType::f32, p.shape.topk}, rows.places, false,
      [&](int i) -> const void* { return here(i) ? local_weights(p, rows, i) : nullptr; }, [](int) { return 0.0f; });
  return true;
}

/// Both ends, once all placements have arrived: writes `cuts` of all rounds. `crossed`: of the owner, at its proxy, with
/// `count` tokens; null at the owner.
template <class A>
SWITCHYARD_FN void cut_rounds(typename A::Warp& w, const ReturnedTokens& rows, const CrossedTables* crossed, int64_t count) {
  constexpr int64_t kTogether = 32;
  const int64_t cuts = rows.rounds() + 1;
  for (int64_t first = spread_index(w) * kTogether; first < cuts; first += w.total() * kTogether) {
    A::for_lanes(w, cuts - first < kTogether ? cuts - first : kTogether, [&](int i) {
      const int64_t t = rows.first_token(first + i), item = crossed != nullptr ? crossed->first_from(t, count) : t;
      rows.cuts[first + i] = {item, rows.counts.before(rows.kind, item)};
    });
  }
  A::settle(w);
}

/// All warps: copies or sums the rows that others cannot read in place.
template <class A>
SWITCHYARD_FN void make_rows(typename A::Warp& w, const CombineParams& p, MoveCounter& moved) {
  if (p.staging.reduce_locally)
    make_sums<A>(w, p, w.total(), moved);
  else if (p.staging.place.pull.ready == 0)
    make_copies<A>(w, p, w.total(), moved);
  A::settle(w);
}

/// Waits until the ranks of this host have copied or summed the rows for the owner's tokens of round k.
template <class A>
SWITCHYARD_FN bool wait_round_outputs(typename A::Warp& w, const CombineParams& p, const ReturnedTokens& rows, int64_t k) {
  int c = 0;
  while (c + 1 < kSumChunks && sum_chunk_end(rows.tokens, c) < rows.first_token(k + 1)) ++c;
  return wait_outputs<A>(w, p, c);
}

/// Converts a rank's parameters to those of its peer's call, as made by the peer's proxy; tokens are the crossing tokens, by
/// number.
SWITCHYARD_FN inline void set_giving(CombineParams& p, const CombineRail& rail, bool any_weights = true) {
  p.tokens = rail.count;
  p.weights = rail.weighted && any_weights ? rail.crossed.weights : nullptr;
  p.tables.sends = SendTable{rail.crossed.sends, nullptr, rail.crossed.stride};
  p.tables.ids = rail.crossed.ids;
  p.tables.route_row = rail.crossed.route_row;
}

/// Proxy: writes the rows that this host returns for token number n. The writes are pending on return.
template <class A>
SWITCHYARD_FN void give_token(typename A::Warp& w, const CombineParams& p, const ReturnedTokens& out, int64_t n,
                              std::byte* to) {
  const auto row_bytes = static_cast<size_t>(p.shape.row_bytes), weight_bytes = 4 * static_cast<size_t>(p.shape.topk);
  if (out.kind == ReturnKind::per_host) {
    sum_local<A>(w, p, n, to, out.weights ? to + row_bytes : nullptr);
    return;
  }
  const TokenRows rows = rows_of(p, n);
  SWITCHYARD_ROLLED
  for (int i = 0; i < rows.places; ++i) {
    if (rows.rank(i) < 0 || !is_mapped<A>(p.call.heap, rows.rank(i))) continue;
    A::copy(w, to, local_row(p, rows, i), row_bytes);
    if (out.weights) {
      const std::byte* const weights = local_weights(p, rows, i);
      if (weights)
        A::copy(w, to + row_bytes, weights, weight_bytes);
      else
        A::fill_zero(w, to + row_bytes, weight_bytes);
    }
    to += out.stride;
  }
}

/// Proxy, all warps: packs the rows of round k. After the last round, announces to the ranks of this host that the peer has
/// read its rows. `p`: set_giving(). Returns false after recording a fault.
template <class A>
SWITCHYARD_FN bool give_rows(typename A::Warp& w, const CombineParams& p, const CombineRail& rail, int64_t k) {
  const ReturnedTokens& out = rail.out;
  if (rail.is_proxy_of_peer && k < out.rounds()) {
    const int64_t begin = out.cuts[k].item, end = out.cuts[k + 1].item;
    if (begin < end && !wait_round_outputs<A>(w, p, out, k)) return false;
    WarpSpan<A> span(w, p.call, Event::pack_rows);
    int64_t packed = 0;
    for (int64_t n = begin + spread_index(w); n < end; n += w.total(), ++packed) give_token<A>(w, p, out, n, out.row(k, n));
    A::settle(w);
    span.set_arg(packed);
  }
  if (rail.ends_with(k) && arrive_is_last<A>(w, rail.arrivals))
    publish_for<A>(w, p.call, p.shape.control, Site::pulled, rail.peer);
  return true;
}

/// Owner: sums token t of round k from rows, as on a single host. The writes are pending on return.
template <class A>
SWITCHYARD_FN void add_token(typename A::Warp& w, const CombineParams& p, const ReturningHosts& in, int64_t k, int64_t t,
                             MoveCounter& moved) {
  const TokenRows rows = rows_of(p, t);
  const int64_t row_bytes = p.shape.row_bytes;
  const auto here = [&](int i) { return is_mapped<A>(p.call.heap, rows.rank(i)); };
  const auto arrived = [&](int i) -> const std::byte* {  // `i`: position among the rows of its host
    const int host = in.host_of[rows.rank(i)];
    int before = 0;
    for (int j = 0; j < i; ++j) before += rows.rank(j) >= 0 && in.host_of[rows.rank(j)] == host ? 1 : 0;
    return in.rows[host].row(k, t) + before * in.rows[host].stride;
  };
  const auto row_of = [&](int i) -> const void* {
    if (rows.rank(i) < 0) return nullptr;
    return here(i) ? local_row(p, rows, i) : arrived(i);
  };
  const auto weights_of = [&](int i) -> const void* {
    if (rows.rank(i) < 0) return nullptr;
    return here(i) ? local_weights(p, rows, i) : arrived(i) + row_bytes;
  };
  sum_rows<A>(w, p, t, rows, row_of, weights_of, moved, {0, row_bytes});
}

/// Owner: counts the rows of token t that add_hosts() has summed.
template <class A>
SWITCHYARD_FN void count_hosts(typename A::Warp& w, const CombineParams& p, int64_t t, int sums, MoveCounter& moved) {
  const TokenRows rows = rows_of(p, t);
  const auto ranks_where = [&](auto&& f) {
    return bits(A::lanes_where(w, rows.places, [&](int i) { return rows.rank(i) >= 0 && f(rows.rank(i)); }));
  };
  const int own = ranks_where([&](int r) { return r == p.call.rank(); });
  const int here = ranks_where([&](int r) { return is_mapped<A>(p.call.heap, r); });
  moved.payload_rows += static_cast<uint64_t>(here + sums);
  moved.local_bytes += static_cast<uint64_t>(own * p.shape.row_bytes);
  moved.remote_bytes += static_cast<uint64_t>((here - own + sums) * p.shape.row_bytes);
}

/// Owner: sums token t of round k from the sums of the hosts; this host's sum is computed in `mine`. Settled on return.
template <class A>
SWITCHYARD_FN void add_hosts(typename A::Warp& w, const CombineParams& p, const ReturningHosts& in, int64_t k, int64_t t,
                             std::byte* mine, MoveCounter& moved) {
  const int64_t row_bytes = p.shape.row_bytes, at = t * row_bytes;
  std::byte* const my_weights = mine + round_up(row_bytes, 128);
  const bool any = sum_local<A>(w, p, t, mine, p.shape.out_weights ? my_weights : nullptr);
  A::settle(w);
  const auto returns = [&](int host) { return host != in.own_host && in.rows[host].counts.of(ReturnKind::per_host, t) > 0; };
  const auto sum_of = [&](int host) -> const std::byte* {
    if (host == in.own_host) return any ? mine : nullptr;
    return returns(host) ? in.rows[host].row(k, t) : nullptr;
  };
  const std::byte* const bias0 = p.shape.bias[0] ? p.shape.bias[0] + at : nullptr;
  const std::byte* const bias1 = p.shape.bias[1] ? p.shape.bias[1] + at : nullptr;
  A::template reduce_rows_from<kMaxRanks>(
      w, ReduceSpec{p.shape.out + at, nullptr, nullptr, 0, {bias0, bias1}, p.shape.type, p.shape.hidden}, in.hosts, false,
      [&](int host) -> const void* { return sum_of(host); }, [](int) { return 0.0f; });
  if (p.shape.out_weights) {
    A::template reduce_rows_from<kMaxRanks>(
        w,
        ReduceSpec{p.shape.out_weights + t * p.shape.topk, nullptr, nullptr, 0, {nullptr, nullptr}, DType::f32, p.shape.topk},
        in.hosts, false,
        [&](int host) -> const void* {
          const std::byte* const row = sum_of(host);
          return row == nullptr ? nullptr : row == mine ? my_weights : row + row_bytes;
        },
        [](int) { return 0.0f; });
  }
  A::settle(w);  // `mine` is free again
  count_hosts<A>(w, p, t, bits(A::lanes_where(w, in.hosts, returns)), moved);
}

/// Owner, all warps: sums the tokens of round k and, after the last round, ends the call as on a single host (end_pulls).
/// Returns false after recording a fault.
template <class A>
SWITCHYARD_FN bool add_rows(typename A::Warp& w, const CombineParams& p, const ReturningHosts& in, const ReturnedTokens& own,
                            int64_t k) {
  const int64_t begin = own.first_token(k), end = own.first_token(k + 1);
  MoveCounter moved;
  if (begin < end) {
    if (!wait_round_outputs<A>(w, p, own, k)) return false;
    WarpSpan<A> span(w, p.call, Event::sum_returned);
    std::byte* const mine = in.scratch != nullptr ? in.scratch + w.index() * in.scratch_stride : w.scratch();
    SWITCHYARD_ROLLED
    for (int64_t t = begin + spread_index(w); t < end; t += w.total()) {
      if (own.kind == ReturnKind::per_host)
        add_hosts<A>(w, p, in, k, t, mine, moved);
      else
        add_token<A>(w, p, in, k, t, moved);
    }
    A::settle(w);
    span.set_arg(static_cast<int64_t>(moved.payload_rows));
    span.set_bytes(moved.remote_bytes);
  }
  add_moved<A>(w, p.call, moved);
  return k + 1 != in.rounds || end_pulls<A>(w, p);
}

}  // namespace switchyard::detail

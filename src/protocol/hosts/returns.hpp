// SPDX-License-Identifier: Apache-2.0
// Combine across several hosts. On each other host, the proxy of a token's owner reads the token's rows there, as an owner does
// on its own host. It returns them in rounds of the owner's tokens: the exact rows (per_rank, per_route) or their sum
// (per_host). The owner adds the rows of its own host and the returned rows. Rows that peers on the host cannot read in place
// are copied first, or summed first in a per_rank combine of expert-major rows (combine_copies.hpp, combine_sums.hpp).
//
// | flag    | written by                               | read by            | order           | scope  | reuse              |
// | outputs | ranks that copy or sum, each chunk       | owners and proxies | release/acquire | system | epoch, never reset |
// | pulled  | owner's, or its proxy's, last warp       | expert's warp 0    | release/acquire | system | epoch, never reset |
// | network | warps of one rank: rounds.hpp                                                                            |
//
// Before the kernel starts, all placements have been exchanged and agree. Progress: all warps copy or sum before they wait.
// The rounds follow, in which warps wait for `outputs` from ranks of this host; the wait for `pulled` is last.
#pragma once

#include "protocol/hosts/returned_rows.hpp"
#include "protocol/normal/combine_copies.hpp"

namespace switchyard::detail {

/// Both directions of one rail in a combine.
struct CombineRail : ReturnRail {
  CombineParams sum;  ///< of this call, with the tables of `crossed`
};

/// Pointers refer to this rank's private memory.
struct HostCombineParams {
  CombineParams sum;
  Rounds rounds;
  CombineRail* rails = nullptr;
  PeerTransfer* transfers = nullptr;  ///< [num_rails]
  int num_rails = 0;
  ReturnedRows own;  ///< rounds of this rank's tokens, identical for all returning peers
  ReturnKind return_kind = ReturnKind::per_rank;
  const int* rail_of_host = nullptr;  ///< [hosts] rail on which its rows are returned; -1: this host
  int hosts = 1;
  const int* host_of = nullptr;  ///< [W]
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

/// The rounds of a combine (rounds.hpp, Steps).
template <class A>
class ReturnSteps {
 public:
  ReturnSteps(const HostCombineParams& p, MoveCounter& moved) : p_(p), moved_(moved) {}

  bool pack(typename A::Warp& w, int64_t k, WorkQueue<A>& items) {
    int64_t begin[kMaxRanks], count[kMaxRanks];
    for (int i = 0; i < p_.num_rails; ++i) {
      const CombineRail& rail = p_.rails[i];
      begin[i] = count[i] = 0;
      if (!rail.is_proxy_of_peer) continue;
      begin[i] = rail.number(k);
      count[i] = rail.number(k + 1) - begin[i];
      if (count[i] > 0 && !wait_chunk(w, rail.out, k)) return false;
    }
    WarpSpan<A> span(w, call(), Event::pack_rows);
    int64_t packed = 0;
    for (;; items.done(), ++packed) {
      const Located at = A::locate(w, items.item(w), p_.num_rails, [&](int i) { return count[i]; });
      if (at.segment == p_.num_rails) break;
      const CombineRail& rail = p_.rails[at.segment];
      const int64_t n = begin[at.segment] + at.offset;
      give_back(w, rail, n,
                rail.out.slot(k) + (rail.out.rows_before[n] - rail.out.rows_before[begin[at.segment]]) * rail.out.stride);
    }
    A::settle(w);
    span.set_arg(packed);
    return true;
  }
  void packed(typename A::Warp& w, int64_t k) {
    for (int i = 0; i < p_.num_rails; ++i)
      if (p_.rails[i].is_proxy_of_peer && k + 1 == p_.rails[i].out.rounds())
        publish_for<A>(w, call(), p_.sum.shape.control, Site::pulled, p_.rails[i].peer);
  }
  /// Sets `pulled` for owners without tokens. Call from one warp.
  void announce_empty(typename A::Warp& w) {
    for (int i = 0; i < p_.num_rails; ++i)
      if (p_.rails[i].is_proxy_of_peer && p_.rails[i].out.rounds() == 0)
        publish_for<A>(w, call(), p_.sum.shape.control, Site::pulled, p_.rails[i].peer);
  }

  std::span<const PeerTransfer> transfers(int64_t k) {
    for (int i = 0; i < p_.num_rails; ++i) p_.transfers[i] = p_.rails[i].transfer(k);
    return {p_.transfers, static_cast<size_t>(p_.num_rails)};
  }

  bool take(typename A::Warp& w, int64_t k, WorkQueue<A>& items) {
    const int64_t begin = p_.own.first_token(k), end = p_.own.first_token(k + 1);
    if (begin < end && !wait_chunk(w, p_.own, k)) return false;
    WarpSpan<A> span(w, call(), Event::sum_returned);
    const MoveCounter before = moved_;
    for (int64_t i = 0; (i = items.item(w)) < end - begin; items.done()) {
      if (p_.return_kind == ReturnKind::per_host)
        add_hosts(w, k, begin + i);
      else
        add_rows(w, k, begin + i);
    }
    A::settle(w);
    span.set_arg(static_cast<int64_t>(moved_.payload_rows - before.payload_rows));
    span.set_bytes(moved_.remote_bytes - before.remote_bytes);
    return true;
  }
  void took(typename A::Warp&, int64_t) {}

 private:
  const CallContext& call() const { return p_.sum.call; }

  /// Waits until the ranks of this host have copied or summed the rows for the owner's tokens of round k.
  bool wait_chunk(typename A::Warp& w, const ReturnedRows& rows, int64_t k) {
    int c = 0;
    while (c + 1 < kSumChunks && sum_chunk_end(rows.tokens, c) < rows.first_token(k + 1)) ++c;
    return wait_outputs<A>(w, p_.sum, c);
  }

  /// Proxy: writes the rows that this host returns for token number n. The writes are pending on return.
  void give_back(typename A::Warp& w, const CombineRail& rail, int64_t n, std::byte* to) {
    const CombineParams& p = rail.sum;
    const auto row_bytes = static_cast<size_t>(p.shape.row_bytes), weight_bytes = 4 * static_cast<size_t>(p.shape.topk);
    if (p_.return_kind == ReturnKind::per_host) {
      sum_local<A>(w, p, n, to, rail.out.weights ? to + row_bytes : nullptr);
      return;
    }
    const TokenRows rows = rows_of(p, n);
    for (int i = 0; i < rows.places; ++i) {
      if (rows.rank(i) < 0 || !is_mapped<A>(p.call.heap, rows.rank(i))) continue;
      A::copy(w, to, local_row(p, rows, i), row_bytes);
      if (rail.out.weights) {
        const std::byte* const weights = local_weights(p, rows, i);
        if (weights)
          A::copy(w, to + row_bytes, weights, weight_bytes);
        else
          A::fill_zero(w, to + row_bytes, weight_bytes);
      }
      to += rail.out.stride;
    }
  }

  /// Owner: the first row of token t that arrived from `host` in round k.
  const std::byte* returned(int64_t k, int host, int64_t t) const {
    const ReturnedRows& in = p_.rails[p_.rail_of_host[host]].in;
    return in.slot(k) + (in.rows_before[t] - in.rows_before[in.first_token(k)]) * in.stride;
  }
  int64_t rows_returned(int host, int64_t t) const {
    const ReturnedRows& in = p_.rails[p_.rail_of_host[host]].in;
    return in.rows_before[t + 1] - in.rows_before[t];
  }

  /// Owner: sums token t from rows, as on a single host. The writes are pending on return.
  void add_rows(typename A::Warp& w, int64_t k, int64_t t) {
    const CombineParams& p = p_.sum;
    const TokenRows rows = rows_of(p, t);
    const int64_t row_bytes = p.shape.row_bytes;
    const auto arrived = [&](int i) {  // `i`: position among the rows of its host
      const int host = p_.host_of[rows.rank(i)];
      int before = 0;
      for (int j = 0; j < i; ++j) before += rows.rank(j) >= 0 && p_.host_of[rows.rank(j)] == host ? 1 : 0;
      return returned(k, host, t) + before * p_.own.stride;
    };
    const auto here = [&](int i) { return is_mapped<A>(p.call.heap, rows.rank(i)); };
    const auto row_of = [&](int i) -> const void* {
      if (rows.rank(i) < 0) return nullptr;
      return here(i) ? local_row(p, rows, i) : arrived(i);
    };
    const auto weights_of = [&](int i) -> const void* {
      if (rows.rank(i) < 0) return nullptr;
      return here(i) ? local_weights(p, rows, i) : arrived(i) + row_bytes;
    };
    sum_rows<A>(w, p, t, rows, row_of, weights_of, moved_, {0, row_bytes});
    const uint64_t crossed = A::lanes_where(w, rows.places, [&](int i) { return rows.rank(i) >= 0 && !here(i); });
    moved_.network_bytes += static_cast<uint64_t>(bits(crossed) * row_bytes);
  }

  /// Owner: sums token t from per-host sums; this host's sum is in the warp's scratch. Settled on return.
  void add_hosts(typename A::Warp& w, int64_t k, int64_t t) {
    const CombineParams& p = p_.sum;
    const int64_t row_bytes = p.shape.row_bytes, at = t * row_bytes;
    std::byte *const mine = w.scratch(), *const my_weights = mine + round_up(row_bytes, 128);
    const bool any = sum_local<A>(w, p, t, mine, p.shape.out_weights ? my_weights : nullptr);
    A::settle(w);
    const auto sum_of = [&](int host) -> const std::byte* {
      if (p_.rail_of_host[host] < 0) return any ? mine : nullptr;
      return rows_returned(host, t) > 0 ? returned(k, host, t) : nullptr;
    };
    const auto bias = [&](int b) { return p.shape.bias[b] ? p.shape.bias[b] + at : nullptr; };
    A::template reduce_rows_from<kMaxRanks>(
        w, ReduceSpec{p.shape.out + at, nullptr, nullptr, 0, {bias(0), bias(1)}, p.shape.type, p.shape.hidden}, p_.hosts, false,
        [&](int host) -> const void* { return sum_of(host); }, [](int) { return 0.0f; });
    if (p.shape.out_weights) {
      A::template reduce_rows_from<kMaxRanks>(
          w,
          ReduceSpec{p.shape.out_weights + t * p.shape.topk, nullptr, nullptr, 0, {nullptr, nullptr}, DType::f32, p.shape.topk},
          p_.hosts, false,
          [&](int host) -> const void* {
            const std::byte* const row = sum_of(host);
            return row == nullptr ? nullptr : row == mine ? my_weights : row + row_bytes;
          },
          [](int) { return 0.0f; });
    }
    A::settle(w);  // the scratch is free again
    count_hosts(w, t);
  }

  void count_hosts(typename A::Warp& w, int64_t t) {
    const CombineParams& p = p_.sum;
    const TokenRows rows = rows_of(p, t);
    const auto rank_is = [&](auto&& f) {
      return bits(A::lanes_where(w, rows.places, [&](int i) { return rows.rank(i) >= 0 && f(rows.rank(i)); }));
    };
    const int own = rank_is([&](int r) { return r == p.call.rank(); });
    const int here = rank_is([&](int r) { return is_mapped<A>(p.call.heap, r); });
    int64_t sums = 0;
    for (int host = 0; host < p_.hosts; ++host)
      if (p_.rail_of_host[host] >= 0) sums += rows_returned(host, t);
    moved_.payload_rows += static_cast<uint64_t>(here + sums);
    moved_.local_bytes += static_cast<uint64_t>(own * p.shape.row_bytes);
    moved_.remote_bytes += static_cast<uint64_t>((here - own + sums) * p.shape.row_bytes);
    moved_.network_bytes += static_cast<uint64_t>(sums * p.shape.row_bytes);
  }

  const HostCombineParams& p_;
  MoveCounter& moved_;
};

/// Kernel body: combine_direct for a group that spans several hosts; runs after placements have been exchanged and agree.
template <class A>
bool combine_hosts(typename A::Warp& w, const HostCombineParams& h) {
  const CombineParams& p = h.sum;
  MoveCounter moved;
  if (p.staging.reduce_locally)
    make_sums<A>(w, p, w.total(), moved);
  else if (p.staging.place.pull.ready == 0)
    make_copies<A>(w, p, w.total(), moved);
  ReturnSteps<A> steps(h, moved);
  if (w.index() == 0) steps.announce_empty(w);
  if (!begin_rounds<A>(w, p.call, h.rounds, steps) || !finish_rounds<A>(w, p.call, h.rounds, steps)) return false;
  p.call.moved[w.index()] = moved;
  return end_pulls<A>(w, p);
}

}  // namespace switchyard::detail

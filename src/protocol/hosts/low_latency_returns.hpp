// SPDX-License-Identifier: Apache-2.0
// Low-latency combine across several hosts. For a token of another host, a rank sends its rows to the owner's proxy on the
// rank's own host: to a slot like the owner's, in the object's memory outside the heap. The proxy collects the rows as they
// arrive and returns them in rounds of the owner's tokens. The owner stores them in its slots as if they had been pushed there.
//
// | word     | written by                    | read by                | order | scope  | reuse                          |
// | returned | a warp of an expert's rank    | warps of owner's proxy | none  | system | zero again when read; two sets |
// | network  | warps of one rank: rounds.hpp |                        |       |        |                                |
//
// Buffers: the slots of a set are blank again at the end of a call. They are written again two calls later, by ranks that have
// observed the announcement of the intervening call. Progress: all warps send before they wait; a proxy waits for ranks of its
// host, which have already sent, and an owner waits for rounds.
#pragma once

#include "protocol/hosts/returned_rows.hpp"
#include "protocol/low_latency/combine.hpp"

namespace switchyard::detail {

/// Slots for rows of tokens that belong to ranks on other hosts, and these ranks' proxies on this host.
struct RemoteReturns {
  HeapView heap;
  const int* proxy = nullptr;   ///< [W] the proxy of each rank on this host
  const int* number = nullptr;  ///< [W] index of the rank among those of its proxy
  int max = 0;                  ///< maximum number of ranks per proxy
  int slots = 1, stride = 0;    ///< slots per token and bytes per slot, as in LowLatencyLayout
  int64_t bytes_of_owner = 0;

  RemoteReturns() = default;
  RemoteReturns(const LowLatencyLayout& l, int max_owners)
      : max(max_owners),
        slots(l.at.slots),
        stride(l.at.return_stride),
        bytes_of_owner(int64_t{l.max_tokens} * l.at.slots * l.at.return_stride) {}
  int64_t bytes() const { return static_cast<int64_t>(kHeapHeaderBytes) + 2 * max * bytes_of_owner; }
  SWITCHYARD_FN std::byte* row(uint64_t epoch, int owner, int t, int slot) const {
    const int64_t set = static_cast<int64_t>(epoch & 1) * max + number[owner];
    return heap.base[proxy[owner]] + kHeapHeaderBytes + set * bytes_of_owner + (int64_t{t} * slots + slot) * stride;
  }
};

/// LowLatencyCombineParams for a group that spans several hosts: rows for unmapped owners are sent to `remote` (return_slot).
struct RemoteCombineParams : LowLatencyCombineParams {
  RemoteReturns remote;
};

/// Bit mask of a token's slots that receive rows from `host`. id(k): expert of the token's choice k, or -1.
template <class Ids>
SWITCHYARD_FN uint64_t slots_from(const LowLatencyLayout& l, CombineOrder order, const Ids& id, const int* host_of, int host) {
  uint64_t slots = 0;
  for (int k = 0; k < l.topk; ++k) {
    if (id(k) < 0 || host_of[l.owner(id(k))] != host) continue;
    if (order == CombineOrder::per_rank) {
      slots |= uint64_t{1} << l.owner(id(k));
      continue;
    }
    int first = 0;
    while (id(first) != id(k)) ++first;
    slots |= uint64_t{1} << first;
  }
  return slots;
}

/// Waits for `bytes` bytes of a row returned by rank `writer`. Returns false after recording a fault.
template <class A, class P>
SWITCHYARD_FN bool wait_returned_row(typename A::Warp& w, const P& p, const std::byte* row, size_t bytes, int writer) {
  if (A::has_arrived(w, row, bytes, sentinel_sums())) return true;
  WarpSpan<A> span(w, p.call, Event::wait_returned, writer);
  WaitClock<A> clock(writer);
  const uint64_t* const entered = p.call.heap.local(p.layout.header(p.call.epoch, writer));  // no other word is more specific
  do {
    if (!clock.keep_waiting(w, p.call, Site::returned, entered, p.call.word())) return false;
  } while (!A::has_arrived(w, row, bytes, sentinel_sums()));
  clock.charge(w, p.call, writer);
  return true;
}

/// Proxy: takes `bytes` bytes, starting at `at`, of the row that rank `writer` of this host returns for token t of `owner`, and
/// copies `copied` bytes from its slot to `to`. Settled on return. Returns false after recording a fault.
template <class A, class P>
SWITCHYARD_FN bool collect_row(typename A::Warp& w, const P& p, int owner, int t, int slot, int writer, int64_t at,
                               size_t bytes, std::byte* to, size_t copied) {
  std::byte* const row = p.remote.row(p.call.epoch, owner, t, slot) + at;
  if (!wait_returned_row<A>(w, p, row, bytes, writer)) return false;
  A::copy(w, to, row, copied);
  A::settle(w);
  A::blank_row(w, row, bytes, sentinel_sums());
  return true;
}

/// Pointers refer to this rank's private memory.
struct ReturnRails {
  Rounds rounds;
  ReturnRail* rails = nullptr;
  const int* host_of_rail = nullptr;  ///< host of its peer
  PeerTransfer* transfers = nullptr;  ///< [num_rails]
  int num_rails = 0;
  ReturnedRows own;              ///< rounds of this rank's tokens
  const int* host_of = nullptr;  ///< [W]
  int own_host = 0;
};

/// The rounds of a combine (rounds.hpp, Steps).
template <class A>
class ReturnedSteps {
 public:
  ReturnedSteps(const RemoteCombineParams& p, const ReturnRails& rails) : p_(p), rails_(rails) {}

  bool pack(typename A::Warp& w, int64_t k, WorkQueue<A>& items) {
    WarpSpan<A> span(w, p_.call, Event::pack_rows);
    const auto begin = [&](int i) { return rail(i).is_proxy_of_peer ? rail(i).number(k) : 0; };
    int64_t packed = 0;
    for (;; items.done(), ++packed) {
      const Located item = A::locate(w, items.item(w), rails_.num_rails, [&](int i) {
        return rail(i).is_proxy_of_peer ? rail(i).number(k + 1) - rail(i).number(k) : 0;
      });
      if (item.segment == rails_.num_rails) break;
      const ReturnRail& to = rail(item.segment);
      const int64_t first = begin(item.segment), n = first + item.offset;
      if (!collect(w, to, n, to.out.slot(k) + (to.out.rows_before[n] - to.out.rows_before[first]) * to.out.stride))
        return false;
    }
    span.set_arg(packed);
    return true;
  }
  void packed(typename A::Warp&, int64_t) {}
  std::span<const PeerTransfer> transfers(int64_t k) {
    for (int i = 0; i < rails_.num_rails; ++i) rails_.transfers[i] = rail(i).transfer(k);
    return {rails_.transfers, static_cast<size_t>(rails_.num_rails)};
  }

  bool take(typename A::Warp& w, int64_t k, WorkQueue<A>& items) {
    WarpSpan<A> span(w, p_.call, Event::forward_rows);
    const int64_t begin = rails_.own.first_token(k), end = rails_.own.first_token(k + 1);
    int64_t rows = 0;
    for (int64_t i = 0; (i = items.item(w)) < end - begin; items.done())
      for (int r = 0; r < rails_.num_rails; ++r)
        if (rail(r).peer_is_my_proxy) rows += put(w, rail(r).in, rails_.host_of_rail[r], k, static_cast<int>(begin + i));
    p_.call.moved[w.index()].network_bytes += static_cast<uint64_t>(rows * p_.row_bytes);
    span.set_arg(rows);
    return true;
  }
  void took(typename A::Warp&, int64_t) {}

 private:
  const ReturnRail& rail(int i) const { return rails_.rails[i]; }

  /// Proxy: takes the rows that this host returns for an owner's token number n from the owner's slots. Settled on return.
  /// Returns false after recording a fault.
  bool collect(typename A::Warp& w, const ReturnRail& to, int64_t n, std::byte* out) {
    const LowLatencyLayout& l = p_.layout;
    const int32_t* const ids = to.crossed->ids.data() + n * l.topk;
    const int t = to.crossed->token[static_cast<size_t>(n)];
    const auto bytes = static_cast<size_t>(p_.row_bytes);
    const uint64_t slots = slots_from(
        l, p_.order, [ids](int k) { return ids[k]; }, rails_.host_of, rails_.own_host);
    for (uint64_t left = slots; left != 0; left &= left - 1, out += to.out.stride) {
      const int slot = nth_bit(left, 0);
      const int writer = p_.order == CombineOrder::per_rank ? slot : l.owner(ids[slot]);
      if (!collect_row<A>(w, p_, to.peer, t, slot, writer, 0, bytes, out, bytes)) return false;
    }
    return true;
  }

  /// Owner: stores the rows of token t that arrived from a host in round k in its slots. \returns their number
  int put(typename A::Warp& w, const ReturnedRows& in, int host, int64_t k, int t) {
    const LowLatencyLayout& l = p_.layout;
    const int32_t* const ids = p_.own_ids + int64_t{t} * l.topk;
    const std::byte* from = in.slot(k) + (in.rows_before[t] - in.rows_before[in.first_token(k)]) * in.stride;
    uint64_t left = slots_from(
        l, p_.order, [ids](int j) { return ids[j]; }, rails_.host_of, host);
    const int rows = bits(left);
    for (; left != 0; left &= left - 1, from += in.stride) {
      std::byte* const to = p_.call.heap.local(l.return_row(p_.call.epoch, t, nth_bit(left, 0)));
      A::multicast_sentinel(
          w, 1, [to](int) -> void* { return to; }, from, static_cast<size_t>(p_.row_bytes));
    }
    return rows;
  }

  const RemoteCombineParams& p_;
  const ReturnRails& rails_;
};

/// Returns rows over the network after all ranks have entered the call. Call from all warps before low_latency_sum. Returns
/// false after recording a fault.
template <class A>
bool pull_returned(typename A::Warp& w, const RemoteCombineParams& p, const ReturnRails& rails) {
  ReturnedSteps<A> steps(p, rails);
  return begin_rounds<A>(w, p.call, rails.rounds, steps) && finish_rounds<A>(w, p.call, rails.rounds, steps);
}

}  // namespace switchyard::detail

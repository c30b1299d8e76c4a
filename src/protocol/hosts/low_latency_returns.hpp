// SPDX-License-Identifier: Apache-2.0
// Low-latency combine across several hosts. For a token of another host, a rank sends its rows to the owner's proxy on the
// rank's own host: to a slot like the owner's, in the object's memory outside the heap. The proxy collects the rows as they
// arrive and returns them in a round. The owner sums them in place.
//
// | word     | written by                    | read by                | order | scope  | reuse                          |
// | returned | a warp of an expert's rank    | warps of owner's proxy | none  | system | zero again when read; two sets |
//
// Buffers: the slots of a set are blank again at the end of a call. They are written again two calls later, by ranks that have
// observed the announcement of the intervening call. Progress: all warps send before they wait; a proxy waits for ranks of its
// host, which have already sent, and an owner waits for rounds.
#pragma once

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
  SWITCHYARD_FN RemoteReturns(const LowLatencyLayout& l, int max_owners)
      : max(max_owners),
        slots(l.at.slots),
        stride(l.at.return_stride),
        bytes_of_owner(int64_t{l.max_tokens} * l.at.slots * l.at.return_stride) {}
  SWITCHYARD_FN int64_t bytes() const { return static_cast<int64_t>(kHeapHeaderBytes) + 2 * max * bytes_of_owner; }
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

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Low-latency dispatch across several hosts. A token crosses to each other destination host once, quantized by its source, and
// is sent to the source's proxy there. The proxy writes the messages that the source would write, to the same places, and sets
// the source's flags: `call_header`, `expert_count`, and for every message a flag for whether it has arrived or is not for the
// reader.
//
// | flag         | written by                            | read by           | order           | scope  | reuse               |
// | call_header  | each rank and its proxies             | all ranks         | release/acquire | system | epoch; two sets     |
// | expert_count | each rank and its proxies             | the expert's rank | none            | system | epoch; two sets     |
// | message      | a source's block, or its proxy's warp | receiver's warps  | release/acquire | system | epoch; two sets     |
//
// Buffers: a proxy writes for a call only while it is in that call itself, so it is at most one call ahead of its host, like a
// source on that host. A rank has slots for all its messages, so sending does not wait. Progress: a proxy waits for headers,
// then for rows, which their sources send before they wait for anything; the ranks of its host wait for the proxy.
#pragma once

#include "protocol/hosts/message.hpp"
#include "protocol/low_latency/dispatch.hpp"

namespace switchyard::detail {

/// A crossing token: the row and its scales at the same offsets as in a message, and the entries of all its choices.
struct CrossingMessage {
  int64_t entries_at = 0, bytes = 0;

  explicit SWITCHYARD_FN CrossingMessage(const LowLatencyLayout& l)
      : entries_at(l.entries_at()),
        bytes(round_up(entries_at + int64_t{l.topk} * static_cast<int64_t>(sizeof(LowLatencyEntry)), 128)) {}
  SWITCHYARD_FN const LowLatencyEntry* entries(const std::byte* slot) const {
    return reinterpret_cast<const LowLatencyEntry*>(slot + entries_at);
  }
};

/// Announces to the ranks of this host that `source`, on another host, has entered the call. The announcement is ordered after
/// everything that this warp has settled.
template <class A>
SWITCHYARD_FN void publish_header_of(typename A::Warp& w, const CallContext& call, const LowLatencyLayout& l, int source,
                                     uint64_t value) {
  A::template publish_to<Scope::system>(
      w, call.world(),
      [&](int r) {
        return FlagStore{reach<A>(call.heap, r, l.header(call.epoch, source)), flag_word(call.epoch, value)};
      },
      Site::call_header);
}

/// Announces message `unit` of `source` to the ranks of this host: to those in `places` that it has arrived, and to the others
/// that it will not arrive.
template <class A, class P>
SWITCHYARD_FN void announce_forwarded(typename A::Warp& w, const P& p, int source, int unit, uint64_t places) {
  A::template publish_to<Scope::system>(
      w, p.call.world(),
      [&](int r) {
        return FlagStore{reach<A>(p.call.heap, r, p.layout.arrival(p.call.epoch, source, unit)),
                         flag_word(p.call.epoch, places >> r & 1)};
      },
      Site::message);
}

/// Writes the message that `source` would write to the ranks in `places`: the row in `slot` and the unit's entries. Settled.
template <class A, class P>
SWITCHYARD_FN void write_message(typename A::Warp& w, const P& p, int source, int unit, const std::byte* slot,
                                 const LowLatencyEntry* entries, uint64_t places) {
  const auto& l = p.layout;
  const auto part = [&](int64_t at, const void* from, int64_t bytes) {
    if (bytes == 0) return;
    A::multicast_to(
        w, p.call.world(),
        [&](int r) -> void* {
          return (places >> r & 1) ? p.call.heap.at(r, l.message(p.call.epoch, source, unit)) + at : nullptr;
        },
        from, static_cast<size_t>(bytes));
  };
  if (l.units_per_token() == 1 || !entries->alias()) {  // as in carries_row
    part(0, slot, l.payload_bytes);
    part(l.scales_at(), slot + l.scales_at(), l.scale_bytes);
  }
  part(l.entries_at(), entries, int64_t{l.entries} * static_cast<int64_t>(sizeof(LowLatencyEntry)));
  A::settle(w);
}

/// Forwards a unit of `source` to the ranks of this host. `slot` contains the unit's token, with the `entries` of all its
/// choices.
template <class A, class P>
SWITCHYARD_FN void forward_unit(typename A::Warp& w, const P& p, int source, int unit, const std::byte* slot,
                                const LowLatencyEntry* entries) {
  const auto& l = p.layout;
  const LowLatencyEntry* const mine = entries + l.first_k_of(unit);
  const uint64_t all = A::lanes_union(
      w, l.entries, [&](int j) { return mine[j].expert >= 0 ? uint64_t{1} << l.owner(mine[j].expert) : uint64_t{0}; });
  const uint64_t places = mapped_of<A>(p.call.heap, all);
  if (places != 0) write_message<A>(w, p, source, unit, slot, mine, places);
  announce_forwarded<A>(w, p, source, unit, places);
}

}  // namespace switchyard::detail

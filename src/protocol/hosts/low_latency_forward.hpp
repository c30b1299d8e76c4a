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
// | network      | warps of one rank: rounds.hpp         |                   |                 |        |                     |
//
// Buffers: a proxy writes for a call only while it is in that call itself, so it is at most one call ahead of its host, like a
// source on that host. A rank has slots for all its messages, so sending does not wait. Progress: a proxy waits for headers,
// then for rows, which their sources send before they wait for anything; the ranks of its host wait for the proxy.
#pragma once

#include "plan/hosts.hpp"
#include "protocol/hosts/rounds.hpp"
#include "protocol/low_latency/dispatch.hpp"

namespace switchyard::detail {

/// A crossing token: the row and its scales at the same offsets as in a message, the entries of all its choices, and the
/// token's number.
struct CrossingMessage {
  int64_t entries_at = 0, token_at = 0, bytes = 0;

  explicit SWITCHYARD_FN CrossingMessage(const LowLatencyLayout& l)
      : entries_at(l.entries_at()),
        token_at(entries_at + int64_t{l.topk} * static_cast<int64_t>(sizeof(LowLatencyEntry))),
        bytes(round_up(token_at + static_cast<int64_t>(sizeof(int64_t)), 128)) {}
  SWITCHYARD_FN const LowLatencyEntry* entries(const std::byte* slot) const {
    return reinterpret_cast<const LowLatencyEntry*>(slot + entries_at);
  }
  int token(const std::byte* slot) const { return static_cast<int>(*reinterpret_cast<const int64_t*>(slot + token_at)); }
};

/// Both directions of one rail in a dispatch.
struct MessageRail {
  int peer = -1;
  const int32_t* leaving = nullptr;  ///< tokens that cross to the peer, if it is this rank's proxy
  ItemsInRounds out, in;
  // The peer's tokens, if this rank is its proxy.
  bool is_proxy_of_peer = false;
  CrossedTokens* crossed = nullptr;  ///< token and ids, which combine needs
  int tokens = 0;                    ///< of the peer

  /// Address of the peer's token number i in the rounds that have arrived.
  const std::byte* arrived(int64_t i) const { return in.slot(i / in.per_round) + i % in.per_round * in.stride; }
};

/// Pointers refer to this rank's private memory.
struct MessageRails {
  Rounds out, in;
  MessageRail* rails = nullptr;
  PeerTransfer* transfers = nullptr;  ///< [num_rails]
  int num_rails = 0;
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

/// Announces the number of rows from `source` to the ranks of this host: counts[i] for expert experts[i].
template <class A>
void post_counts_of(typename A::Warp& w, const CallContext& call, const LowLatencyLayout& l, int source,
                    std::span<const int32_t> experts, const int32_t* counts) {
  for (size_t i = 0; i < experts.size(); ++i) {
    const int owner = l.owner(experts[i]);
    A::post(w, call.heap.at(owner, l.expert_count(call.epoch, experts[i] - l.first_expert(owner), source)),
            flag_word(call.epoch, static_cast<uint64_t>(counts[i])));
  }
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

/// The rounds of a dispatch (rounds.hpp, Steps): packs outgoing rounds and forwards the contents of incoming ones.
template <class A>
class MessageSteps {
 public:
  MessageSteps(const LowLatencyDispatchParams& p, const MessageRails& rails, MoveCounter& moved)
      : p_(p), rails_(rails), at_(p.layout), moved_(moved) {}

  bool pack(typename A::Warp& w, int64_t k, WorkQueue<A>& items) {
    WarpSpan<A> span(w, p_.call, Event::pack_rows);
    int64_t rows = 0;
    for (;; items.done(), ++rows) {
      const Located item = A::locate(w, items.item(w), rails_.num_rails, [&](int i) { return rail(i).out.in_round(k); });
      if (item.segment == rails_.num_rails) break;
      const MessageRail& to = rail(item.segment);
      pack_token(w, to.leaving[to.out.begin(k) + item.offset], to.out.slot(k) + item.offset * to.out.stride);
    }
    A::settle(w);
    span.set_arg(rows);  // their bytes are counted when messages are sent to ranks
    return true;
  }
  void packed(typename A::Warp&, int64_t) {}
  std::span<const PeerTransfer> transfers(int64_t k) {
    for (int i = 0; i < rails_.num_rails; ++i)
      rails_.transfers[i] = {rail(i).peer, {rail(i).out.slot(k), static_cast<size_t>(rail(i).out.bytes(k))}, {}};
    return {rails_.transfers, static_cast<size_t>(rails_.num_rails)};
  }

  bool take(typename A::Warp& w, int64_t k, WorkQueue<A>& items) {
    WarpSpan<A> span(w, p_.call, Event::forward_rows);
    int64_t rows = 0;
    for (;; items.done(), ++rows) {
      const Located item = A::locate(w, items.item(w), rails_.num_rails, [&](int i) { return rail(i).in.in_round(k); });
      if (item.segment == rails_.num_rails) break;
      forward(w, rail(item.segment), rail(item.segment).in.begin(k) + item.offset);
    }
    span.set_arg(rows);
    return true;
  }
  void took(typename A::Warp&, int64_t) {}
  /// Announces the messages of sources with no tokens crossing to this host, because nothing else announces them. Call from one
  /// warp.
  void announce_empty(typename A::Warp& w) {
    for (int i = 0; i < rails_.num_rails; ++i)
      if (rail(i).is_proxy_of_peer && rail(i).in.count == 0) announce_absent(w, rail(i).peer, 0, rail(i).tokens);
  }

 private:
  const MessageRail& rail(int i) const { return rails_.rails[i]; }

  /// Packs a token. The writes are pending on return.
  void pack_token(typename A::Warp& w, int t, std::byte* slot) {
    const LowLatencyLayout& l = p_.layout;
    std::byte* const scales = slot + l.scales_at();
    const std::byte* const x = p_.x + int64_t{t} * p_.src_row_bytes;
    if (p_.quantize != ScaleKind::none) {
      A::quantize_row(w, reinterpret_cast<uint8_t*>(slot), scales, x, p_.src_type, l.hidden, p_.quantize, p_.scale_group);
    } else {
      A::copy(w, slot, x, static_cast<size_t>(l.payload_bytes));
      if (p_.scales) A::copy(w, scales, p_.scales + int64_t{t} * p_.src_scale_bytes, static_cast<size_t>(l.scale_bytes));
    }
    auto* const entries = reinterpret_cast<LowLatencyEntry*>(slot + at_.entries_at);
    for (int k = 0; k < l.topk; ++k)
      entries[k] = make_entry(p_, t * l.topk, k, [&](int32_t expert) { return tokens_choosing<A>(w, p_, t, expert); });
    *reinterpret_cast<int64_t*>(slot + at_.token_at) = t;
    moved_.network_bytes += static_cast<uint64_t>(l.payload_bytes + l.scale_bytes);
  }

  /// Forwards token number i of a source, and announces that no messages will arrive for preceding tokens that do not cross.
  void forward(typename A::Warp& w, const MessageRail& from, int64_t i) {
    const LowLatencyLayout& l = p_.layout;
    const std::byte* const slot = from.arrived(i);
    const LowLatencyEntry* const entries = at_.entries(slot);
    const int t = at_.token(slot);
    announce_absent(w, from.peer, i > 0 ? at_.token(from.arrived(i - 1)) + 1 : 0, t);
    from.crossed->token[static_cast<size_t>(i)] = t;
    for (int k = 0; k < l.topk; ++k) from.crossed->ids[static_cast<size_t>(i * l.topk + k)] = entries[k].expert;
    const int units = l.units_per_token();
    for (int unit = t * units; unit < (t + 1) * units; ++unit) forward_unit<A>(w, p_, from.peer, unit, slot, entries);
    if (i + 1 == from.in.count) announce_absent(w, from.peer, t + 1, from.tokens);
  }
  /// Announces that no messages will arrive for tokens [begin, end).
  void announce_absent(typename A::Warp& w, int source, int begin, int end) {
    const int units = p_.layout.units_per_token();
    for (int unit = begin * units; unit < end * units; ++unit) announce_forwarded<A>(w, p_, source, unit, 0);
  }

  const LowLatencyDispatchParams& p_;
  const MessageRails& rails_;
  const CrossingMessage at_;
  MoveCounter& moved_;
};

/// Packs the crossing tokens and starts sending them. Does not wait. Call from all warps before low_latency_send.
template <class A>
bool send_crossing(typename A::Warp& w, const LowLatencyDispatchParams& p, const MessageRails& rails, MoveCounter& moved) {
  MessageSteps<A> steps(p, rails, moved);
  for (int64_t k = 0; k < rails.out.count; ++k)
    if (!pack_round<A>(w, p.call, rails.out, steps, k)) return false;
  return true;
}

/// Forwards the messages arriving for this host, after all ranks have entered the call. Call from all warps before
/// low_latency_receive. Returns false after recording a fault.
template <class A>
bool forward_crossing(typename A::Warp& w, const LowLatencyDispatchParams& p, const MessageRails& rails) {
  MoveCounter moved;
  MessageSteps<A> steps(p, rails, moved);
  if (w.index() == 0) steps.announce_empty(w);
  for (int64_t k = 0; k < rails.in.count; ++k)
    if (!take_round<A>(w, p.call, rails.in, steps, k)) return false;
  // Waits until this rank's own messages have also been sent and their slots are free.
  if (w.index() != 0) return true;
  return await_round<A>(w, p.call, *rails.in.carrier, rails.in.first + static_cast<uint64_t>(rails.in.count),
                        &rails.in.work->awaited.value);
}

}  // namespace switchyard::detail

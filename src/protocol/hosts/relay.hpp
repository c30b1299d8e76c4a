// SPDX-License-Identifier: Apache-2.0
// Short messages of a rank to all ranks of other hosts: it sends them to those that stand for it, which pass them on as if they
// were its own. One warp of each rank. Counts and placements (protocol/counts.hpp) travel so.
//
// Buffers: of the carrier's round. Progress: a rank tells its own host of itself before it relays anything, so a wait names
// whoever did not come.
#pragma once

#include <cstring>
#include <vector>

#include "protocol/hosts/rounds.hpp"

namespace switchyard::detail {

/// Another host's rank that this one exchanges rows with.
struct RailPeer {
  int rank = -1;
  int host = -1;
  bool stands_for_me = false;
  bool i_stand = false;            ///< for it, on this host
  std::vector<std::byte> out, in;  ///< messages
};

/// Head of a message: which call it is of, and a number of the sender's.
struct RelayHead {
  uint64_t call;
  uint64_t operation;
  int64_t number;
  uint64_t bytes;
};

/// Begins to send a message to each of those who stand for this rank: `out_bytes(peer)` bytes that fill(peer, to) writes, with
/// number(peer). Of each rank that this one stands for as many as in_bytes(peer) says are awaited.
template <class OutBytes, class InBytes, class Number, class Fill>
void post_relay(const CallContext& call, Carrier& carrier, uint64_t round, std::vector<RailPeer>& peers, OutBytes&& out_bytes,
                InBytes&& in_bytes, Number&& number, Fill&& fill) {
  std::vector<Leg> legs;
  for (RailPeer& peer : peers) {
    const size_t bytes = peer.stands_for_me ? out_bytes(peer) : 0;
    peer.out.resize(peer.stands_for_me ? sizeof(RelayHead) + bytes : 0);
    peer.in.resize(peer.i_stand ? sizeof(RelayHead) + in_bytes(peer) : 0);
    if (peer.stands_for_me) {
      const RelayHead head{call.word(), static_cast<uint64_t>(call.operation), number(peer), bytes};
      std::memcpy(peer.out.data(), &head, sizeof head);
      fill(peer, peer.out.data() + sizeof head);
    }
    legs.push_back({peer.rank, peer.out, peer.in});
  }
  carrier.post(round, legs, nullptr);
}

/// Waits for that round, and calls deliver(source, number, message) for what came of each rank that this one stands for. False
/// after a fault (recorded).
template <class A, class Deliver>
bool take_relay(typename A::Warp& w, const CallContext& call, Carrier& carrier, uint64_t round,
                const std::vector<RailPeer>& peers, Deliver&& deliver) {
  if (!await_round<A>(w, call, carrier, round)) return false;
  for (const RailPeer& peer : peers) {
    if (!peer.i_stand) continue;
    RelayHead head;
    std::memcpy(&head, peer.in.data(), sizeof head);
    const size_t bytes = peer.in.size() - sizeof head;
    if (head.call != call.word() || head.operation != static_cast<uint64_t>(call.operation) || head.bytes != bytes)
      return record_mismatch<A>(w, call, Site::network, peer.rank);
    deliver(peer.rank, head.number, peer.in.data() + sizeof head);
  }
  return true;
}

/// Sends the same `bytes` bytes to all who stand for this rank, with number(peer), and takes as many of each rank that this one
/// stands for. False after a fault (recorded).
template <class A, class Number, class Deliver>
bool relay(typename A::Warp& w, const CallContext& call, Carrier& carrier, uint64_t round, std::vector<RailPeer>& peers,
           const void* message, size_t bytes, Number&& number, Deliver&& deliver) {
  const auto size = [bytes](const RailPeer&) { return bytes; };
  const auto fill = [&](const RailPeer&, std::byte* to) { std::memcpy(to, message, bytes); };
  post_relay(call, carrier, round, peers, size, size, number, fill);
  return take_relay<A>(w, call, carrier, round, peers, deliver);
}

}  // namespace switchyard::detail

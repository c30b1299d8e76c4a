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

/// Sends `bytes` bytes to all who stand for this rank, with number(peer), and calls deliver(source, number, bytes) for what
/// came of each rank that this one stands for. False after a fault (recorded).
template <class A, class Number, class Deliver>
bool relay(typename A::Warp& w, const CallContext& call, Carrier& carrier, uint64_t round, std::vector<RailPeer>& peers,
           const void* message, size_t bytes, Number&& number, Deliver&& deliver) {
  std::vector<Leg> legs;
  for (RailPeer& peer : peers) {
    peer.out.resize(peer.stands_for_me ? sizeof(RelayHead) + bytes : 0);
    peer.in.resize(peer.i_stand ? sizeof(RelayHead) + bytes : 0);
    if (peer.stands_for_me) {
      const RelayHead head{call.word(), static_cast<uint64_t>(call.operation), number(peer), bytes};
      std::memcpy(peer.out.data(), &head, sizeof head);
      std::memcpy(peer.out.data() + sizeof head, message, bytes);
    }
    legs.push_back({peer.rank, peer.out, peer.in});
  }
  carrier.post(round, legs, nullptr);
  if (!await_round<A>(w, call, carrier, round)) return false;
  for (const RailPeer& peer : peers) {
    if (!peer.i_stand) continue;
    RelayHead head;
    std::memcpy(&head, peer.in.data(), sizeof head);
    if (head.call != call.word() || head.operation != static_cast<uint64_t>(call.operation) || head.bytes != bytes)
      return record_mismatch<A>(w, call, Site::network, peer.rank);
    deliver(peer.rank, head.number, peer.in.data() + sizeof head);
  }
  return true;
}

}  // namespace switchyard::detail

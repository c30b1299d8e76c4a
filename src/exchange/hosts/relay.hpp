// SPDX-License-Identifier: Apache-2.0
// Short messages from a rank to all ranks on other hosts: it sends them to its proxies, which forward them like messages of
// their own. Executed by one warp of each rank. Used for counts and placements (protocol/counts.hpp) on the CPU.
//
// Buffers: uses those of the carrier's round. Progress: a rank announces itself to its own host before it relays anything, so
// the report of a failed wait names the missing rank.
#pragma once

#include <cstring>
#include <vector>

#include "exchange/hosts/await_round.hpp"
#include "protocol/hosts/message.hpp"

namespace switchyard::detail {

/// A rank on another host with which this rank exchanges rows.
struct RailPeer {
  int rank = -1;
  int host = -1;
  bool peer_is_my_proxy = false;
  bool is_proxy_of_peer = false;   ///< this rank is its proxy on this host
  std::vector<std::byte> out, in;  ///< messages
};

/// Posts a round that sends the same `bytes` bytes, with number(peer), to all proxies of this rank. take_relay() completes it.
template <class Number>
void post_relay(const CallContext& call, Carrier& carrier, uint64_t round, std::vector<RailPeer>& peers, const void* message,
                size_t bytes, Number&& number) {
  std::vector<PeerTransfer> transfers;
  for (RailPeer& peer : peers) {
    peer.out.resize(peer.peer_is_my_proxy ? sizeof(RelayHead) + bytes : 0);
    peer.in.resize(peer.is_proxy_of_peer ? sizeof(RelayHead) + bytes : 0);
    if (peer.peer_is_my_proxy) {
      const RelayHead head = relay_head(call, number(peer), bytes);
      std::memcpy(peer.out.data(), &head, sizeof head);
      if (bytes > 0) std::memcpy(peer.out.data() + sizeof head, message, bytes);
    }
    transfers.push_back({peer.rank, peer.out, peer.in});
  }
  carrier.post(round, transfers, nullptr);
}

/// Waits for a round of post_relay(), which receives `bytes` bytes from each rank whose proxy is this rank, and calls
/// deliver(source, number, message) for each of these messages. Returns false after recording a fault.
template <class A, class Deliver>
bool take_relay(typename A::Warp& w, const CallContext& call, Carrier& carrier, uint64_t round,
                const std::vector<RailPeer>& peers, size_t bytes, Deliver&& deliver) {
  if (!await_round<A>(w, call, carrier, round)) return false;
  for (const RailPeer& peer : peers) {
    if (!peer.is_proxy_of_peer) continue;
    RelayHead head;
    std::memcpy(&head, peer.in.data(), sizeof head);
    if (!is_of_call(head, call, bytes)) return record_mismatch<A>(w, call, Site::network, peer.rank);
    deliver(peer.rank, head.number, peer.in.data() + sizeof head);
  }
  return true;
}

}  // namespace switchyard::detail

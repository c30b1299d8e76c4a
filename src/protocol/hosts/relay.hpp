// SPDX-License-Identifier: Apache-2.0
// Short messages from a rank to all ranks on other hosts: it sends them to its proxies, which forward them like messages of
// their own. Executed by one warp of each rank. Used for counts and placements (protocol/counts.hpp).
//
// Buffers: uses those of the carrier's round. Progress: a rank announces itself to its own host before it relays anything, so
// the report of a failed wait names the missing rank.
#pragma once

#include <cstring>
#include <vector>

#include "protocol/hosts/rounds.hpp"

namespace switchyard::detail {

/// A rank on another host with which this rank exchanges rows.
struct RailPeer {
  int rank = -1;
  int host = -1;
  bool peer_is_my_proxy = false;
  bool is_proxy_of_peer = false;   ///< this rank is its proxy on this host
  std::vector<std::byte> out, in;  ///< messages
};

/// Starts sending a message to each proxy of this rank, with number(peer) and `out_bytes(peer)` bytes that fill(peer, to)
/// writes. Expects in_bytes(peer) bytes from each rank whose proxy is this rank.
template <class OutBytes, class InBytes, class Number, class Fill>
void post_relay(const CallContext& call, Carrier& carrier, uint64_t round, std::vector<RailPeer>& peers, OutBytes&& out_bytes,
                InBytes&& in_bytes, Number&& number, Fill&& fill) {
  std::vector<PeerTransfer> transfers;
  for (RailPeer& peer : peers) {
    const size_t bytes = peer.peer_is_my_proxy ? out_bytes(peer) : 0;
    peer.out.resize(peer.peer_is_my_proxy ? sizeof(RelayHead) + bytes : 0);
    peer.in.resize(peer.is_proxy_of_peer ? sizeof(RelayHead) + in_bytes(peer) : 0);
    if (peer.peer_is_my_proxy) {
      const RelayHead head = relay_head(call, number(peer), bytes);
      std::memcpy(peer.out.data(), &head, sizeof head);
      fill(peer, peer.out.data() + sizeof head);
    }
    transfers.push_back({peer.rank, peer.out, peer.in});
  }
  carrier.post(round, transfers, nullptr);
}

/// Waits for that round and calls deliver(source, number, message) for the message from each rank whose proxy is this rank.
/// Returns false after recording a fault.
template <class A, class Deliver>
bool take_relay(typename A::Warp& w, const CallContext& call, Carrier& carrier, uint64_t round,
                const std::vector<RailPeer>& peers, Deliver&& deliver) {
  if (!await_round<A>(w, call, carrier, round)) return false;
  for (const RailPeer& peer : peers) {
    if (!peer.is_proxy_of_peer) continue;
    RelayHead head;
    std::memcpy(&head, peer.in.data(), sizeof head);
    const size_t bytes = peer.in.size() - sizeof head;
    if (!is_of_call(head, call, bytes)) return record_mismatch<A>(w, call, Site::network, peer.rank);
    deliver(peer.rank, head.number, peer.in.data() + sizeof head);
  }
  return true;
}

/// Sends the same `bytes` bytes, with number(peer), to all proxies of this rank, and receives the same number of bytes from
/// each rank whose proxy is this rank. Returns false after recording a fault.
template <class A, class Number, class Deliver>
bool relay(typename A::Warp& w, const CallContext& call, Carrier& carrier, uint64_t round, std::vector<RailPeer>& peers,
           const void* message, size_t bytes, Number&& number, Deliver&& deliver) {
  const auto size = [bytes](const RailPeer&) { return bytes; };
  const auto fill = [&](const RailPeer&, std::byte* to) { std::memcpy(to, message, bytes); };
  post_relay(call, carrier, round, peers, size, size, number, fill);
  return take_relay<A>(w, call, carrier, round, peers, deliver);
}

}  // namespace switchyard::detail

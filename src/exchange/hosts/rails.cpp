// SPDX-License-Identifier: Apache-2.0
#include "base/index.hpp"
#include "exchange/hosts/rails.hpp"

#include <cstring>
#include <utility>

namespace switchyard::detail {

HostRails::HostRails(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes)
    : map_(map), rank_(rank), own_host_(map.host_of(rank)), round_bytes_(round_bytes), carrier_(std::move(carrier)) {
  carrier_->share(memory_);
  for (int r = 0; r < map_.world(); ++r) host_of_.push_back(map_.host_of(r));
  for (const int r : map_.rail_peers(rank)) {
    RailPeer peer;
    peer.rank = r;
    peer.host = map_.host_of(r);
    peer.peer_is_my_proxy = map_.proxy(rank, peer.host) == r;
    peer.is_proxy_of_peer = map_.proxy(r, own_host_) == rank;
    peers_.push_back(std::move(peer));
  }
  sent_.resize(peers_.size());
  received_.resize(peers_.size());
  transfers_.resize(peers_.size());
}

int HostRails::other_proxy(int rank) const {
  if (map_.together(rank, rank_)) return -1;
  const int proxy = map_.proxy(rank, own_host_);
  return proxy == rank_ ? -1 : proxy;
}

std::byte* HostRails::grow(PrivateBuffer& memory, int64_t bytes) {
  if (idx(bytes) > memory.bytes) {
    memory = PrivateBuffer::make(idx(bytes));
    std::memset(memory.data.get(), 0, memory.bytes);  // the network also transfers the bytes between rows
  }
  return memory.data.get();
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#include "base/index.hpp"
#include "exchange/group/host_rails.hpp"

#include <cstring>
#include <utility>

namespace switchyard::detail {

HostRails::HostRails(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes, uint64_t flags)
    : map_(map),
      rank_(rank),
      own_host_(map.host_of(rank)),
      round_bytes_(round_bytes),
      rail_of_host_(idx(map.hosts()), -1),
      carrier_(std::move(carrier)) {
  carrier_->share(memory_);
  for (int r = 0; r < map_.world(); ++r) host_of_.push_back(map_.host_of(r));
  for (const int r : map_.rail_peers(rank)) {
    RailPeer peer;
    peer.rank = r;
    peer.host = map_.host_of(r);
    peer.peer_is_my_proxy = map_.proxy(rank, peer.host) == r;
    peer.is_proxy_of_peer = map_.proxy(r, own_host_) == rank;
    if (peer.peer_is_my_proxy) rail_of_host_[idx(peer.host)] = static_cast<int>(peers_.size());
    peers_.push_back(std::move(peer));
  }
  sent_.resize(peers_.size());
  received_.resize(peers_.size());
  transfers_.resize(peers_.size());
  work_.set_flags(flags);
}

int HostRails::other_proxy(int rank) const {
  if (map_.together(rank, rank_)) return -1;
  const int proxy = map_.proxy(rank, own_host_);
  return proxy == rank_ ? -1 : proxy;
}

void HostRails::make_slots(Ring& ring, int64_t bytes, std::byte* (&slots)[kRoundSlots]) {
  for (int s = 0; s < kRoundSlots; ++s) {
    PrivateBuffer& slot = ring.slots[s];
    if (bytes > 0 && slot.bytes < idx(bytes)) {
      slot = PrivateBuffer::make(idx(bytes));
      std::memset(slot.data.get(), 0, slot.bytes);  // the network also transfers the bytes between rows
    }
    slots[s] = slot.data.get();
  }
}

std::byte* HostRails::make_slots(Ring& ring, int64_t bytes) {
  PrivateBuffer& memory = ring.slots[0];
  const size_t all = idx(bytes) * kRoundSlots;
  if (all > memory.bytes) {
    memory = PrivateBuffer::make(all);
    std::memset(memory.data.get(), 0, memory.bytes);  // the network also transfers the bytes between rows
  }
  return memory.data.get();
}

Rounds HostRails::take_rounds(int64_t count) {
  const Rounds rounds{carrier_.get(), &work_, next_round_, count};
  next_round_ += static_cast<uint64_t>(count);
  work_.awaited.value = static_cast<uint64_t>(rank_);
  return rounds;
}

}  // namespace switchyard::detail

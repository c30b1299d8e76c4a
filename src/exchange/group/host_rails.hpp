// SPDX-License-Identifier: Apache-2.0
// One rank's data about other hosts, for every mode on the CPU: its carrier, the ranks for which it is the proxy, and its
// rounds.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "bootstrap/host_map.hpp"
#include "carrier/carrier.hpp"
#include "exchange/group/recycler.hpp"
#include "protocol/hosts/relay.hpp"

namespace switchyard::detail {

class HostRails {
 public:
  /// `round_bytes`: approximate bytes per peer and round, identical on all ranks. `flags`: initial value of the flags in
  /// RoundWork.
  HostRails(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes, uint64_t flags);
  HostRails(const HostRails&) = delete;
  HostRails& operator=(const HostRails&) = delete;

  const HostMap& map() const { return map_; }
  const std::vector<int>& host_of() const { return host_of_; }
  int own_host() const { return own_host_; }
  Carrier& carrier() { return *carrier_; }
  std::vector<RailPeer>& peers() { return peers_; }
  /// Returns this object's next round, for one message.
  uint64_t take_round() { return next_round_++; }
  /// Returns the first of this object's next `count` rounds.
  uint64_t reserve_rounds(int64_t count) { return std::exchange(next_round_, next_round_ + static_cast<uint64_t>(count)); }
  /// The proxy of `rank` on this host if it is another rank; -1 if this rank is the proxy or `rank` is on this host. Waiting
  /// for an announcement from `rank` also means waiting for its proxy.
  int other_proxy(int rank) const;

 protected:
  ~HostRails() = default;

  struct Ring {
    PrivateBuffer slots[kRoundSlots];
  };
  /// Allocates the three slots of a ring and sets their addresses.
  static void make_slots(Ring& ring, int64_t bytes, std::byte* (&slots)[kRoundSlots]);
  /// Allocates kRoundSlots slots of `bytes` bytes each. \returns the first of them
  static std::byte* make_slots(Ring& ring, int64_t bytes);
  Rounds take_rounds(int64_t count);

 private:
  /// All send and receive memory for rounds. The carrier holds a reference to it.
  struct Memory {
    std::vector<RailPeer> peers;
    std::vector<Ring> sent, received;
  };
  const std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();

 protected:
  const HostMap map_;
  const int rank_, own_host_;
  const int64_t round_bytes_;
  std::vector<int> host_of_, rail_of_host_;  ///< [W]; [hosts] rail on which its rows are returned, -1: this host
  std::vector<RailPeer>& peers_ = memory_->peers;
  // Indexed by peer.
  std::vector<Ring>&sent_ = memory_->sent, &received_ = memory_->received;
  std::vector<PeerTransfer> transfers_;

 private:
  std::unique_ptr<Carrier> carrier_;
  uint64_t next_round_ = 1;
  RoundWork work_;
};

}  // namespace switchyard::detail

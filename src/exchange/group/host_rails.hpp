// SPDX-License-Identifier: Apache-2.0
// What one rank's exchange has of other hosts on the CPU, in every mode: its way to them, whom it stands for, and rounds.
#pragma once

#include <memory>
#include <vector>

#include "bootstrap/host_map.hpp"
#include "carrier/carrier.hpp"
#include "exchange/group/recycler.hpp"
#include "protocol/hosts/relay.hpp"

namespace switchyard::detail {

class HostRails {
 public:
  /// `round_bytes`: about what goes to a peer in a round; the same on all ranks. `flags`: what RoundWork's begin with.
  HostRails(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes, uint64_t flags);
  HostRails(const HostRails&) = delete;
  HostRails& operator=(const HostRails&) = delete;

  const HostMap& map() const { return map_; }
  const std::vector<int>& host_of() const { return host_of_; }
  int own_host() const { return own_host_; }
  Carrier& carrier() { return *carrier_; }
  std::vector<RailPeer>& peers() { return peers_; }
  /// The next round of this object, which is one message.
  uint64_t take_round() { return next_round_++; }
  /// Who else on this host stands for `rank`, which is on another; -1: this rank does, or `rank` is on this host. A wait for
  /// what `rank` tells is a wait for its proxy, too.
  int other_proxy(int rank) const;

 protected:
  ~HostRails() = default;

  struct Ring {
    PrivateBuffer slots[kRoundSlots];
  };
  /// Makes room in the three slots of a ring and says where they are.
  static void make_room(Ring& ring, int64_t bytes, std::byte* (&slots)[kRoundSlots]);
  Rounds take_rounds(int64_t count);

 private:
  /// All that rounds are sent from and received in. The carrier has a share.
  struct Memory {
    std::vector<RailPeer> peers;
    std::vector<Ring> sent, received;
  };
  const std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();

 protected:
  const HostMap map_;
  const int rank_, own_host_;
  const int64_t round_bytes_;
  std::vector<int> host_of_, rail_of_host_;  ///< [W]; [hosts] of whom its rows come, -1: of this one
  std::vector<RailPeer>& peers_ = memory_->peers;
  // By peer.
  std::vector<Ring>&sent_ = memory_->sent, &received_ = memory_->received;
  std::vector<Leg> legs_;

 private:
  std::unique_ptr<Carrier> carrier_;
  uint64_t next_round_ = 1;
  RoundWork work_;
};

}  // namespace switchyard::detail

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
#include "exchange/hosts/relay.hpp"

namespace switchyard::detail {

class HostRails {
 public:
  /// `round_bytes`: approximate bytes per peer and round, identical on all ranks.
  HostRails(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes);
  HostRails(const HostRails&) = delete;
  HostRails& operator=(const HostRails&) = delete;

  const HostMap& map() const { return map_; }
  const std::vector<int>& host_of() const { return host_of_; }
  int own_host() const { return own_host_; }
  Carrier& carrier() { return *carrier_; }
  std::vector<RailPeer>& peers() { return peers_; }
  /// Returns this object's next round, for one message.
  uint64_t take_round() { return reserve_rounds(1); }
  /// Returns the first of this object's next `count` rounds.
  uint64_t reserve_rounds(int64_t count) { return std::exchange(next_round_, next_round_ + static_cast<uint64_t>(count)); }
  /// The proxy of `rank` on this host if it is another rank; -1 if this rank is the proxy or `rank` is on this host. Waiting
  /// for an announcement from `rank` also means waiting for its proxy.
  int other_proxy(int rank) const;

 protected:
  ~HostRails() = default;

  /// Makes `memory` at least `bytes` bytes long.
  static std::byte* grow(PrivateBuffer& memory, int64_t bytes);

 private:
  /// All send and receive memory for rounds. The carrier holds a reference to it.
  struct Memory {
    std::vector<RailPeer> peers;
    std::vector<PrivateBuffer> sent, received;
  };
  const std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();

 protected:
  const HostMap map_;
  const int rank_, own_host_;
  const int64_t round_bytes_;
  std::vector<int> host_of_;  ///< [W]
  std::vector<RailPeer>& peers_ = memory_->peers;
  // Indexed by peer.
  std::vector<PrivateBuffer>&sent_ = memory_->sent, &received_ = memory_->received;
  std::vector<PeerTransfer> transfers_;

 private:
  std::unique_ptr<Carrier> carrier_;
  uint64_t next_round_ = 1;
};

}  // namespace switchyard::detail

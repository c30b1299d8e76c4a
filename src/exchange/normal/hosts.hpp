// SPDX-License-Identifier: Apache-2.0
// What one rank's exchange has of other hosts on the CPU: its way to them, whom it stands for, and what a call's rounds are.
#pragma once

#include <memory>
#include <vector>

#include "bootstrap/host_map.hpp"
#include "carrier/carrier.hpp"
#include "exchange/group/recycler.hpp"
#include "plan/hosts.hpp"
#include "protocol/hosts/forward.hpp"
#include "protocol/hosts/relay.hpp"
#include "protocol/hosts/returns.hpp"

namespace switchyard::detail {

class HostLinks {
 public:
  /// `round_bytes`: about what goes to a peer in a round; the same on all ranks. `flags`: what RoundWork's begin with.
  HostLinks(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes, uint64_t flags);

  const HostMap& map() const { return map_; }
  const std::vector<int>& host_of() const { return host_of_; }
  int own_host() const { return own_host_; }
  Carrier& carrier() { return *carrier_; }
  std::vector<RailPeer>& peers() { return peers_; }
  /// The next round of this object, which is one message.
  uint64_t take_round() { return next_round_++; }

  /// `leaving` of a fresh dispatch, before the counts travel; room for what crosses.
  void list_leaving(const LocalPlan& local, HandleData& h) const;
  /// That `count` tokens of `source` cross to this host: its counts have come.
  static void set_crossing(const HandleData& h, int source, int64_t count) { crossed_of(h, source).count = count; }

  /// The rounds of a call. Placements have come. What is returned holds until the next call.
  const HostDispatchParams& prepare(const DispatchParams& p, const HandleData& h);
  /// `weighted`: CombineOrder::per_host multiplies rows by the weights that the dispatch carried.
  const HostCombineParams& prepare(const CombineParams& p, const HandleData& h, bool weighted);

 private:
  struct Ring {
    PrivateBuffer slots[kRoundSlots];
  };
  /// Makes room in the three slots of a ring and says where they are.
  static void make_room(Ring& ring, int64_t bytes, std::byte* (&slots)[kRoundSlots]);
  int places_on(int host, int topk) const;
  static CrossedTokens& crossed_of(const HandleData& h, int source);
  void prepare_rail(const DispatchParams& p, const HandleData& h, size_t i);
  void prepare_rail(const CombineParams& p, const HandleData& h, bool weighted, size_t i);
  ReturnedRows rounds_of(const CombineParams& p, int64_t tokens, bool weights) const;
  Rounds take_rounds(int64_t count);

  const HostMap map_;
  const int rank_, own_host_;
  const int64_t round_bytes_;
  std::vector<int> host_of_, rail_of_host_;
  std::vector<RailPeer> peers_;
  std::unique_ptr<Carrier> carrier_;
  uint64_t next_round_ = 1;
  RoundWork work_;
  // By peer.
  std::vector<Ring> sent_, received_;
  std::vector<std::vector<int64_t>> rows_out_, rows_in_;
  std::vector<DispatchRail> dispatch_rails_;
  std::vector<CombineRail> combine_rails_;
  std::vector<Leg> legs_;
  HostDispatchParams dispatch_;
  HostCombineParams combine_;
};

}  // namespace switchyard::detail

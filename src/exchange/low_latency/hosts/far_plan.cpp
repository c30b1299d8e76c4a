// SPDX-License-Identifier: Apache-2.0
#include "base/index.hpp"
#include "exchange/low_latency/hosts/far_plan.hpp"

#include <algorithm>

namespace switchyard::detail {

namespace {

/// The ranks of other hosts that `rank` is the proxy of, ascending.
std::vector<int> stood_for(const HostMap& map, int rank) {
  std::vector<int> ranks;
  for (int r = 0; r < map.world(); ++r)
    if (!map.together(r, rank) && map.proxy(r, map.host_of(rank)) == rank) ranks.push_back(r);
  return ranks;
}

}  // namespace

FarPlan::FarPlan(const HostMap& map, int rank)
    : own_host(map.host_of(rank)),
      own_ranks(static_cast<int>(map.ranks_of(own_host).size())),
      rail_of_host(idx(map.hosts()), -1),
      proxy(idx(map.world()), -1),
      number(idx(map.world()), -1),
      sources(stood_for(map, rank)) {
  for (int r = 0; r < map.world(); ++r) {
    host_of.push_back(map.host_of(r));
    const std::vector<int> others = stood_for(map, r);
    most_sources = std::max(most_sources, static_cast<int>(others.size()));
    for (size_t n = 0; map.together(r, rank) && n < others.size(); ++n) {
      proxy[idx(others[n])] = r;
      number[idx(others[n])] = static_cast<int>(n);
    }
  }
  for (const int r : map.rail_peers(rank)) {
    FarRail rail;
    rail.rank = r;
    rail.host = map.host_of(r);
    rail.host_ranks = static_cast<int>(map.ranks_of(rail.host).size());
    rail.stands_for_me = map.proxy(rank, rail.host) == r ? 1 : 0;
    if (rail.stands_for_me != 0) rail_of_host[idx(rail.host)] = static_cast<int>(rails.size());
    rail.i_stand = proxy[idx(r)] == rank ? 1 : 0;
    if (rail.i_stand != 0) rail.source = number[idx(r)];
    rails.push_back(rail);
  }
}

int64_t rail_bytes(const LowLatencyLayout& l) {
  const CombineRound rows(CombineOrder::per_route, l.topk, l.return_bytes, 1);
  return round_up(std::max(DispatchRound(l).bytes, rows.bytes(l.max_tokens)), 256);
}

std::vector<Leg> dispatch_legs(const FarPlan& plan, const FarRails& far, const LowLatencyLayout& layout) {
  const size_t bytes = idx(DispatchRound(layout).bytes);
  std::vector<Leg> legs;
  for (size_t i = 0; i < plan.rails.size(); ++i) {
    const FarRail& rail = plan.rails[i];
    legs.push_back({rail.rank,
                    {far.sent, rail.stands_for_me != 0 ? bytes : 0},
                    {far.in(static_cast<int>(i)), rail.i_stand != 0 ? bytes : 0}});
  }
  return legs;
}

std::vector<Leg> combine_legs(const FarPlan& plan, const FarRails& far, const LowLatencyCombineParams& p) {
  const auto end = [&](bool rows, int ranks) {
    return rows ? CombineRound(p.order, p.layout.topk, p.row_bytes, ranks).bytes(p.layout.max_tokens) : kRailHeadBytes;
  };
  std::vector<Leg> legs;
  for (size_t i = 0; i < plan.rails.size(); ++i) {
    const FarRail& rail = plan.rails[i];
    const bool stands = rail.stands_for_me != 0, i_stand = rail.i_stand != 0;
    const int64_t out = stands ? 0 : kRailHeadBytes, in = i_stand ? 0 : kRailHeadBytes;  // a head goes to my proxy
    const auto at = static_cast<int>(i);
    legs.push_back({rail.rank,
                    {far.out(at) + out, idx(end(i_stand, plan.own_ranks) - out)},
                    {far.in(at) + in, idx(end(stands, rail.host_ranks) - in)}});
  }
  return legs;
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#include "plan/replicas.hpp"

#include <algorithm>
#include <span>

#include "run/replicas.hpp"
#include "switchyard/expert_map.hpp"

namespace switchyard::tool {
PlannedTraffic plan_traffic(const HostsOfRanks& where, int num_experts, std::vector<Routing> routing, int spare_slots) {
  const auto experts = static_cast<size_t>(num_experts);
  std::vector<int64_t> routes(routing.size() * experts), sums(experts);
  for (size_t r = 0; r < routing.size(); ++r) count_routes(routing[r], std::span(routes).subspan(r * experts, experts));
  for (size_t i = 0; i < routes.size(); ++i) sums[i % experts] += routes[i];

  const int world = where.world(), homes = (num_experts + world - 1) / world;
  const ExpertMap home = home_map(num_experts, world, homes + spare_slots), map = plan_experts(sums, home);
  ExpertLoad load;
  load.home = busiest_over_mean(divide_routes(home, sums));
  load.planned = busiest_over_mean(divide_routes(map, sums));
  load.num_slots = map.num_slots();
  load.moved = count_moved(home, map);
  PlannedTraffic planned{Traffic(where, load.num_slots), load};
  for (size_t r = 0; r < routing.size(); ++r) {
    replace_by_slots(routing[r].topk_ids, divide_source(map, routes, static_cast<int>(r)));
    planned.traffic.add(static_cast<int>(r), routing[r]);
  }
  return planned;
}

PlannedTraffic plain_traffic(const HostsOfRanks& where, const RoutingSource& source, int64_t tokens) {
  PlannedTraffic plain{Traffic(where, source.experts()), {}};
  std::vector<int64_t> sums(static_cast<size_t>(source.experts()));
  for (int r = 0; r < where.world(); ++r) {  // one rank's routing at a time is in memory
    const Routing routing = source.batches(r, tokens, 1).front();
    count_routes(routing, sums);
    plain.traffic.add(r, routing);
  }
  const int homes = (source.experts() + where.world() - 1) / where.world();
  plain.load.home = busiest_over_mean(divide_routes(home_map(source.experts(), where.world(), homes), sums));
  return plain;
}

std::vector<PlannedTraffic> count_traffic(const std::vector<HostsOfRanks>& groups, int64_t tokens, int spare_slots,
                                          const std::function<RoutingSource(int world)>& source_of) {
  std::vector<HostsOfRanks> large;
  int max = 1;
  for (const HostsOfRanks& group : groups) {
    max = std::max(max, group.world());
    if (group.world() > kMaxRanks) large.push_back(group);
  }
  const int64_t counted = counted_tokens(tokens, max);
  std::vector<Traffic> of_large;
  if (!large.empty()) of_large = count_large_traffic(large, counted, source_of(kMaxRanks));
  std::vector<PlannedTraffic> all;
  auto next = of_large.begin();
  for (const HostsOfRanks& group : groups) {
    if (group.world() > kMaxRanks) {
      all.push_back({std::move(*next++), {}});
    } else {
      const RoutingSource source = source_of(group.world());
      all.push_back(spare_slots == 0 ? plain_traffic(group, source, counted)
                                     : plan_traffic(group, source.experts(), source.all_ranks(counted), spare_slots));
    }
    all.back().traffic.scale(counted, tokens);
  }
  return all;
}

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// Load of the ranks' experts, and its balance with replicas that are planned from the routing itself.
#pragma once

#include <functional>
#include <vector>

#include "plan/traffic.hpp"
#include "switchyard/routing.hpp"

namespace switchyard::tool {

/// The routes of the busiest rank over the mean, without and with replicas.
struct ExpertLoad {
  double home = 1, planned = 1;
  int spare_slots = 0;  ///< per rank
  int num_slots = 0;    ///< of all ranks, including empty ones
  int moved = 0;        ///< replicas and exchanged experts: sets of weights that a rank does not hold without the plan
};

/// A group's traffic whose experts are slots.
struct PlannedTraffic {
  Traffic traffic;
  ExpertLoad load;
};

/// The traffic of each group with `tokens` tokens per rank, and the load of its experts. `source_of(world)` returns the routing
/// for a group of at most kMaxRanks ranks. \pre `spare_slots` is 0 if a group has more than kMaxRanks ranks; their load is 1
std::vector<PlannedTraffic> count_traffic(const std::vector<HostsOfRanks>& groups, int64_t tokens, int spare_slots,
                                          const std::function<RoutingSource(int world)>& source_of);

/// The traffic of `routing`, the routing of each rank, with `spare_slots` slots per rank for replicas; 0: as it is. \pre at
/// most kMaxRanks ranks
PlannedTraffic plan_traffic(const HostsOfRanks& where, int num_experts, std::vector<Routing> routing, int spare_slots);

}  // namespace switchyard::tool

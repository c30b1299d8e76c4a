// SPDX-License-Identifier: Apache-2.0
// Expert load per rank, and its balance with replicas planned from the same routing.
#pragma once

#include <functional>
#include <vector>

#include "plan/traffic.hpp"
#include "switchyard/routing.hpp"

namespace switchyard::tool {

/// The ratio of the busiest rank's routes to the mean, without and with replicas.
struct ExpertLoad {
  double home = 1, planned = 1;
  int num_slots = 0;  ///< on all ranks, including empty slots; 0: no replicas
  int moved = 0;      ///< sets of weights to move (count_moved)
};

/// The traffic of a group with slots as experts, and the load of its experts.
struct PlannedTraffic {
  Traffic traffic;
  ExpertLoad load;
};

/// The traffic of each group with `tokens` tokens per rank, and the load of its experts. `source_of(world)` returns the routing
/// for a group of at most kMaxRanks ranks; the load of larger groups is 1. \pre `spare_slots` is 0 if a group has more than
/// kMaxRanks ranks
std::vector<PlannedTraffic> count_traffic(const std::vector<HostsOfRanks>& groups, int64_t tokens, int spare_slots,
                                          const std::function<RoutingSource(int world)>& source_of);

/// The traffic of `routing`, the routing of each rank, with `spare_slots` slots per rank for replicas. \pre at most kMaxRanks
/// ranks
PlannedTraffic plan_traffic(const HostsOfRanks& where, int num_experts, std::vector<Routing> routing, int spare_slots);

/// The traffic of `source` without replicas, with `tokens` tokens per rank. \pre at most kMaxRanks ranks
PlannedTraffic plain_traffic(const HostsOfRanks& where, const RoutingSource& source, int64_t tokens);

}  // namespace switchyard::tool

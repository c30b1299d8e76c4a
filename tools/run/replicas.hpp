// SPDX-License-Identifier: Apache-2.0
// Routing to replicated experts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "run/routing_source.hpp"
#include "switchyard/expert_map.hpp"

namespace switchyard::tool {

/// Adds the route counts of `routing` to `routes`, by expert. Ids that are not experts are ignored.
void count_routes(const Routing& routing, std::span<int64_t> routes);

/// Load of the busiest rank relative to the mean; 1 without routes.
double busiest_over_mean(const SlotLoads& loads);

/// One batch per rank, with slots instead of experts, and the map.
struct ReplicatedRouting {
  std::vector<Routing> routing;  ///< of num_experts = map.num_slots()
  ExpertMap map;
  int moved = 0;                        ///< sets of weights that the map adds to the home map
  double busiest_without_replicas = 1;  ///< routes of the busiest rank over the mean, for the same batches with the home map
  std::vector<Routing> of_experts;      ///< the batches before the replacement
  std::vector<int64_t> expected;        ///< replicate_experts(): the selector's routes, [W, E]
};

/// Simulates an application: plans a map with `spare_slots` extra slots per rank from the second batch of the source, and uses
/// SlotSelector to replace the ids of the first batch with slots. \throws Error(invalid_argument) if there is no such map
ReplicatedRouting replicate_experts(const RoutingSource& source, int world, int64_t tokens, int spare_slots);

/// Plans the map from the first batch itself and divides its routes exactly, as SlotSelector::balance() does if fetches cost
/// nothing. \throws Error(invalid_argument) if no such map exists
ReplicatedRouting balance_experts(const RoutingSource& source, int world, int64_t tokens, int spare_slots);

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
#include "run/replicas.hpp"

#include <algorithm>
#include <exception>
#include <numeric>
#include <span>

#include "launch/on_threads.hpp"
#include "switchyard/group.hpp"

namespace switchyard::tool {
namespace {

/// Replaces the ids of all ranks, each on a thread of its own.
void select_slots(const ExpertMap& map, std::span<const int64_t> routes, std::vector<Routing>& routing) {
  GroupOptions options;
  options.heap_bytes = size_t{1} << 20;
  std::vector<Group> groups = Group::in_process(map.world, options);
  std::vector<std::exception_ptr> errors(groups.size());
  launch::on_threads(groups.size(), [&](size_t r) {
    try {
      SlotSelector selector(groups[r], map, routes);
      selector.select(routing[r].expert_ids(), routing[r].topk_ids.data());
      routing[r].num_experts = map.num_slots();
    } catch (...) {
      errors[r] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace

void count_routes(const Routing& routing, std::span<int64_t> routes) {
  for (const int32_t id : routing.topk_ids)
    if (id >= 0 && id < routing.num_experts) ++routes[static_cast<size_t>(id)];
}

double busiest_over_mean(const SlotLoads& loads) {
  const auto sum = static_cast<double>(std::accumulate(loads.of_rank.begin(), loads.of_rank.end(), int64_t{0}));
  return sum > 0 ? static_cast<double>(loads.max()) * static_cast<double>(loads.of_rank.size()) / sum : 1;
}

ReplicatedRouting replicate_experts(const RoutingSource& source, int world, int64_t tokens, int spare_slots) {
  const auto experts = static_cast<size_t>(source.experts());
  std::vector<int64_t> past(static_cast<size_t>(world) * experts), past_sums(experts), sums(experts);
  ReplicatedRouting result;
  for (int r = 0; r < world; ++r) {
    std::vector<Routing> batches = source.batches(r, tokens, 2);
    count_routes(batches[1], std::span(past).subspan(static_cast<size_t>(r) * experts, experts));
    count_routes(batches[0], sums);
    for (int32_t& id : batches[0].topk_ids)
      if (id >= source.experts()) id = -1;  // recordings may contain such ids, for dropped routes
    result.routing.push_back(std::move(batches[0]));
  }
  for (size_t i = 0; i < past.size(); ++i) past_sums[i % experts] += past[i];
  const ExpertMap home = home_map(source.experts(), world, (source.experts() + world - 1) / world + spare_slots);
  result.map = plan_experts(past_sums, home);
  result.moved = count_moved(home, result.map);
  result.busiest_without_replicas = busiest_over_mean(divide_routes(home, sums));
  select_slots(result.map, past, result.routing);
  return result;
}

}  // namespace switchyard::tool

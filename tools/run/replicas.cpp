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

/// Replaces ids that are not experts, which recordings may contain for dropped routes.
void drop_invalid(Routing& routing) {
  for (int32_t& id : routing.topk_ids)
    if (id < 0 || id >= routing.num_experts) id = -1;
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
    drop_invalid(batches[0]);
    result.of_experts.push_back(std::move(batches[0]));
  }
  for (size_t i = 0; i < past.size(); ++i) past_sums[i % experts] += past[i];
  const ExpertMap home = home_map(source.experts(), world, (source.experts() + world - 1) / world + spare_slots);
  result.map = plan_experts(past_sums, home);
  result.moved = count_moved(home, result.map);
  result.busiest_without_replicas = busiest_over_mean(divide_routes(home, sums));
  result.routing = result.of_experts;
  select_slots(result.map, past, result.routing);
  result.expected = std::move(past);
  return result;
}

ReplicatedRouting balance_experts(const RoutingSource& source, int world, int64_t tokens, int spare_slots) {
  const auto experts = static_cast<size_t>(source.experts());
  std::vector<int64_t> routes(static_cast<size_t>(world) * experts), sums(experts);
  ReplicatedRouting result;
  result.of_experts = source.all_ranks(tokens);
  for (size_t r = 0; r < result.of_experts.size(); ++r) {
    drop_invalid(result.of_experts[r]);
    count_routes(result.of_experts[r], std::span(routes).subspan(r * experts, experts));
  }
  for (size_t i = 0; i < routes.size(); ++i) sums[i % experts] += routes[i];
  const ExpertMap home = home_map(source.experts(), world, (source.experts() + world - 1) / world + spare_slots);
  StepOptions options;
  options.seconds_per_move = 0;
  result.map = plan_step(sums, home, 0, options).map;
  result.moved = count_moved(home, result.map);
  result.busiest_without_replicas = busiest_over_mean(divide_routes(home, sums));
  result.routing = result.of_experts;
  for (int r = 0; r < world; ++r) {
    Routing& mine = result.routing[static_cast<size_t>(r)];
    replace_by_slots(mine.topk_ids, divide_source(result.map, routes, r));
    mine.num_experts = result.map.num_slots();
  }
  return result;
}

}  // namespace switchyard::tool

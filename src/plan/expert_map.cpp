// SPDX-License-Identifier: Apache-2.0
#include "switchyard/expert_map.hpp"

#include <algorithm>
#include <string>

#include "layout/addressing.hpp"
#include "plan/expert_division.hpp"
#include "switchyard/group.hpp"
#include "switchyard/status.hpp"

namespace switchyard {

namespace {

using detail::slot_idx;

constexpr int64_t kMaxRoutes = int64_t{1} << 40;

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::invalid_argument, text); }

std::string is(const char* name, int64_t value) { return std::string(name) + " = " + std::to_string(value); }

void check_sizes(int num_experts, int world, int slots_per_rank) {
  if (world < 1 || world > kMaxRanks)
    refuse(is("ExpertMap::world", world) + ": must be in [1, " + std::to_string(kMaxRanks) + "]");
  if (num_experts < 1) refuse(is("ExpertMap::num_experts", num_experts) + ": must be at least 1");
  const int home = detail::ExpertRanges{num_experts, world}.max_count(), max = (1 << 20) / world;
  if (home > max)
    refuse(is("ExpertMap::num_experts", num_experts) + ": " + std::to_string(world) + " ranks have at most " +
           std::to_string(max) + " slots each");
  if (slots_per_rank < home || slots_per_rank > max)
    refuse(is("ExpertMap::slots_per_rank", slots_per_rank) + ": must be in [" + std::to_string(home) + ", " +
           std::to_string(max) + "] for " + std::to_string(num_experts) + " experts on " + std::to_string(world) + " ranks");
}

void check_routes(std::span<const int64_t> routes, size_t size, const char* name) {
  if (routes.size() != size)
    refuse(std::string(name) + " has " + std::to_string(routes.size()) + " elements: must be " + std::to_string(size));
  for (size_t i = 0; i < size; ++i)
    if (routes[i] < 0 || routes[i] > kMaxRoutes)
      refuse(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(routes[i]) + ": must be in [0, 2^40]");
}

void check_pair(const char* function, const ExpertMap& from, const ExpertMap& to) {
  if (from.num_experts != to.num_experts || from.world != to.world || from.slots_per_rank != to.slots_per_rank)
    refuse(std::string(function) + ": the maps have different numbers of experts, ranks or slots");
  check_expert_map(from);
  check_expert_map(to);
}

/// Appends the runs of the routes of rank `source` to one expert. `slots`: those of the expert; `left`: their shares;
/// `routes_of(r)`: the routes of rank r to the expert.
template <class RoutesOf>
void append_runs(const std::vector<int>& slots, int slots_per_rank, std::vector<int64_t> left, int source,
                 const RoutesOf& routes_of, std::vector<SlotRuns::Run>& runs) {
  int64_t before = 0, mine = routes_of(source);  // routes of lower ranks and of `source` that their own slots do not take
  for (int r = 0; r < source; ++r) before += routes_of(r);
  for (size_t i = 0; i < slots.size(); ++i) {
    const int rank = slots[i] / slots_per_rank;
    const int64_t own = std::min(routes_of(rank), left[i]);
    left[i] -= own;
    if (rank < source) before -= own;
    if (rank != source) continue;
    mine -= own;
    if (own > 0) runs.push_back({slots[i], own});
  }
  for (size_t i = 0; i < slots.size() && mine > 0; ++i) {
    const int64_t passed = std::min(before, left[i]), taken = std::min(mine, left[i] - passed);
    before -= passed;
    mine -= taken;
    if (taken > 0) runs.push_back({slots[i], taken});
  }
}

}  // namespace

void check_expert_map(const ExpertMap& map) {
  check_sizes(map.num_experts, map.world, map.slots_per_rank);
  if (map.expert_of_slot.size() != slot_idx(map.num_slots()))
    refuse("ExpertMap::expert_of_slot has " + std::to_string(map.expert_of_slot.size()) + " elements: must be " +
           std::to_string(map.num_slots()) + ", world times slots_per_rank");
  std::vector<char> held(slot_idx(map.num_experts), 0);
  for (int p = 0; p < map.num_slots(); ++p) {
    const int32_t e = map.expert_of_slot[slot_idx(p)];
    if (e < -1 || e >= map.num_experts)
      refuse("ExpertMap::expert_of_slot[" + std::to_string(p) + "] is " + std::to_string(e) + ": must be in [-1, " +
             std::to_string(map.num_experts) + ")");
    if (e >= 0) held[slot_idx(e)] = 1;
  }
  const auto missing = std::find(held.begin(), held.end(), 0);
  if (missing != held.end())
    refuse("ExpertMap::expert_of_slot has no slot of expert " + std::to_string(missing - held.begin()));
}

ExpertMap home_map(int num_experts, int world, int slots_per_rank) {
  check_sizes(num_experts, world, slots_per_rank);
  ExpertMap map{num_experts, world, slots_per_rank, {}};
  map.expert_of_slot.assign(slot_idx(map.num_slots()), -1);
  const detail::ExpertRanges home{num_experts, world};
  for (int e = 0; e < num_experts; ++e) {
    const int rank = home.owner(e);
    map.expert_of_slot[slot_idx(rank * slots_per_rank + e - home.first(rank))] = e;
  }
  return map;
}

int64_t SlotLoads::max() const noexcept { return of_rank.empty() ? 0 : *std::max_element(of_rank.begin(), of_rank.end()); }

SlotLoads divide_routes(const ExpertMap& map, std::span<const int64_t> routes_per_expert) {
  check_expert_map(map);
  check_routes(routes_per_expert, slot_idx(map.num_experts), "routes_per_expert");
  return detail::ExpertDivision(map, routes_per_expert).loads();
}

namespace detail {

ExpertDivision divide_all(const ExpertMap& map, std::span<const int64_t> routes) {
  check_expert_map(map);
  const size_t experts = slot_idx(map.num_experts);
  check_routes(routes, slot_idx(map.world) * experts, "routes");
  std::vector<int64_t> sums(experts);
  for (size_t i = 0; i < routes.size(); ++i) sums[i % experts] += routes[i];
  check_routes(sums, experts, "the sum of routes over the ranks");
  return ExpertDivision(map, sums);
}

SlotRuns runs_of_source(const ExpertDivision& division, const ExpertMap& map, std::span<const int64_t> routes, int source) {
  const size_t experts = slot_idx(map.num_experts);
  SlotRuns result;
  result.begin.push_back(0);
  for (size_t e = 0; e < experts; ++e) {
    const std::vector<int>& slots = division.slots_of(static_cast<int>(e));
    std::vector<int64_t> shares;
    for (const int p : slots) shares.push_back(division.loads().of_slot[slot_idx(p)]);
    append_runs(
        slots, map.slots_per_rank, std::move(shares), source, [&](int r) { return routes[slot_idx(r) * experts + e]; },
        result.runs);
    result.begin.push_back(result.runs.size());
  }
  return result;
}

}  // namespace detail

SlotRuns divide_source(const ExpertMap& map, std::span<const int64_t> routes, int source) {
  const detail::ExpertDivision division = detail::divide_all(map, routes);
  if (source < 0 || source >= map.world) refuse(is("source", source) + ": must be in [0, " + std::to_string(map.world) + ")");
  return detail::runs_of_source(division, map, routes, source);
}

void replace_by_slots(std::span<int32_t> ids, const SlotRuns& runs) {
  detail::SlotSequence slots(runs);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == -1) continue;
    if (ids[i] < 0 || slot_idx(ids[i]) >= slots.num_experts())
      refuse("ids[" + std::to_string(i) + "] is " + std::to_string(ids[i]) + ": must be -1 or an expert in [0, " +
             std::to_string(slots.num_experts()) + ")");
    const int32_t slot = slots.next(slot_idx(ids[i]));
    if (slot < 0)
      refuse("ids has more routes to expert " + std::to_string(ids[i]) + " than the runs, which were made for another routing");
    ids[i] = slot;
  }
}

ExpertMap vacate(const ExpertMap& from, const ExpertMap& to) {
  check_pair("vacate", from, to);
  ExpertMap vacated = from;
  std::vector<bool> has_slot(slot_idx(from.num_experts), false);
  for (size_t p = 0; p < vacated.expert_of_slot.size(); ++p) {
    int32_t& e = vacated.expert_of_slot[p];
    if (e != to.expert_of_slot[p]) e = -1;
    if (e >= 0) has_slot[slot_idx(e)] = true;
  }
  for (size_t e = 0; e < has_slot.size(); ++e)
    if (!has_slot[e])
      refuse("to: expert " + std::to_string(e) +
             " keeps no slot of from, so its weights cannot move in the background: use "
             "move_weights()");
  return vacated;
}

int count_moved(const ExpertMap& from, const ExpertMap& to) {
  check_pair("count_moved", from, to);
  int moved = 0;
  for (int r = 0; r < to.world; ++r) {
    const auto begin = to.expert_of_slot.begin() + static_cast<std::ptrdiff_t>(r) * to.slots_per_rank;
    std::vector<int32_t> experts(begin, begin + to.slots_per_rank);
    std::sort(experts.begin(), experts.end());
    experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
    for (const int32_t e : experts) moved += e >= 0 && !detail::holds(from, r, e) ? 1 : 0;
  }
  return moved;
}

}  // namespace switchyard

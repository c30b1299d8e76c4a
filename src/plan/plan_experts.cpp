// SPDX-License-Identifier: Apache-2.0
// The replica planner (plan_experts).
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "plan/expert_division.hpp"
#include "switchyard/expert_map.hpp"
#include "switchyard/status.hpp"

namespace switchyard {

namespace {

using detail::ExpertDivision;
using detail::holds;
using detail::slot_idx;

constexpr int kMaxExchanges = 32;

using Routes = std::span<const int64_t>;

/// The indices [begin, begin + count) in descending order of their values.
std::vector<int> by_descending(const std::vector<int64_t>& values, int begin, int count) {
  std::vector<int> order(slot_idx(count));
  std::iota(order.begin(), order.end(), begin);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[slot_idx(a)] > values[slot_idx(b)]; });
  return order;
}

int32_t& expert_in(ExpertMap& map, int slot) { return map.expert_of_slot[slot_idx(slot)]; }

/// An empty slot of `rank`, or -1; the slot of expert `e` in `current` if possible.
int empty_slot(const ExpertMap& map, int rank, const ExpertMap& current, int32_t e) {
  int found = -1;
  for (int p = (rank + 1) * map.slots_per_rank; p-- > rank * map.slots_per_rank;) {
    if (map.expert_of_slot[slot_idx(p)] != -1) continue;
    if (current.expert_of_slot[slot_idx(p)] == e) return p;
    found = p;
  }
  return found;
}

/// The slot with the smallest load of at least `wanted`, else the one with the largest load, among the slots that satisfy
/// `allowed`; -1 if none has routes. `slots` are in descending order of load.
template <class Allowed>
int choose_slot(const std::vector<int>& slots, const SlotLoads& loads, int64_t wanted, const Allowed& allowed) {
  int chosen = -1;
  for (const int p : slots) {
    const int64_t load = loads.of_slot[slot_idx(p)];
    if (load == 0 || (chosen >= 0 && load < wanted)) break;
    if (allowed(p)) chosen = p;
  }
  return chosen;
}

/// Adds a replica of an expert of the busiest possible rank to the least loaded possible rank; prefers experts that this rank
/// holds in `current`. Returns false if no replica can improve the balance.
bool add_replica(ExpertMap& map, const ExpertMap& current, const SlotLoads& loads, int64_t mean) {
  const std::vector<int> ranks = by_descending(loads.of_rank, 0, map.world);
  for (const int busy : ranks) {
    const int64_t surplus = loads.of_rank[slot_idx(busy)] - mean;
    if (surplus <= 0) return false;
    const std::vector<int> slots = by_descending(loads.of_slot, busy * map.slots_per_rank, map.slots_per_rank);
    for (auto idle = ranks.rbegin(); idle != ranks.rend() && loads.of_rank[slot_idx(*idle)] < mean; ++idle) {
      if (empty_slot(map, *idle, current, -1) < 0) continue;
      const int64_t wanted = std::min(surplus, mean - loads.of_rank[slot_idx(*idle)]);
      const auto is_new = [&](int p) { return !holds(map, *idle, expert_in(map, p)); };
      const auto is_near = [&](int p) { return is_new(p) && holds(current, *idle, expert_in(map, p)); };
      int from = choose_slot(slots, loads, wanted, is_near);
      if (from < 0 || loads.of_slot[slot_idx(from)] < wanted) from = choose_slot(slots, loads, wanted, is_new);
      if (from < 0) continue;
      const int32_t e = expert_in(map, from);
      expert_in(map, empty_slot(map, *idle, current, e)) = e;
      return true;
    }
  }
  return false;
}

/// `map` without all but the first copy of each expert.
ExpertMap without_replicas(ExpertMap map) {
  std::vector<char> is_held(slot_idx(map.num_experts), 0);
  for (int32_t& e : map.expert_of_slot) {
    if (e < 0) continue;
    if (is_held[slot_idx(e)] != 0)
      e = -1;
    else
      is_held[slot_idx(e)] = 1;
  }
  return map;
}

/// Adds replicas to `map` as long as they may help. Returns the map with the lowest maximum rank load.
ExpertMap with_replicas(Routes routes, ExpertMap map, const ExpertMap& current) {
  const int64_t mean = std::accumulate(routes.begin(), routes.end(), int64_t{0}) / map.world;
  ExpertMap best = map;
  for (int64_t best_load = -1;;) {
    const ExpertDivision division(map, routes, ExpertDivision::Effort::rough);
    if (const int64_t load = division.loads().max(); best_load < 0 || load < best_load) {
      best_load = load;
      best = map;
    }
    if (!add_replica(map, current, division.loads(), mean)) return best;
  }
}

struct Exchange {
  int from = -1, to = -1;
};
/// The exchange of an expert of the busiest rank with an expert or an empty slot of another rank that minimizes the larger load
/// of the two ranks, with the shares of all other experts fixed.
Exchange best_exchange(const ExpertMap& map, const SlotLoads& loads) {
  const int size = map.slots_per_rank;
  const auto busy = static_cast<int>(std::max_element(loads.of_rank.begin(), loads.of_rank.end()) - loads.of_rank.begin());
  int64_t best = loads.of_rank[slot_idx(busy)];
  Exchange found;
  for (int other = 0; other < map.world; ++other) {
    if (other == busy) continue;
    for (int p = busy * size; p < (busy + 1) * size; ++p)
      for (int q = other * size; q < (other + 1) * size; ++q) {
        const int64_t by = loads.of_slot[slot_idx(p)] - loads.of_slot[slot_idx(q)];
        const int64_t load = std::max(loads.of_rank[slot_idx(busy)] - by, loads.of_rank[slot_idx(other)] + by);
        if (by <= 0 || load >= best) continue;
        const int32_t mine = map.expert_of_slot[slot_idx(p)], theirs = map.expert_of_slot[slot_idx(q)];
        if (holds(map, other, mine) || (theirs >= 0 && holds(map, busy, theirs))) continue;
        best = load;
        found = {p, q};
      }
  }
  return found;
}

/// A map and the load of its busiest rank.
struct Plan {
  ExpertMap map;
  int64_t load;
};

/// Exchanges experts of the busiest rank as long as this reduces the maximum rank load.
Plan refine(Routes routes, ExpertMap map, int max_exchanges) {
  SlotLoads loads = ExpertDivision(map, routes).loads();
  for (int i = 0; i < max_exchanges; ++i) {
    const Exchange e = best_exchange(map, loads);
    if (e.from < 0) break;
    std::swap(expert_in(map, e.from), expert_in(map, e.to));
    SlotLoads after = ExpertDivision(map, routes).loads();
    if (after.max() >= loads.max()) {
      std::swap(expert_in(map, e.from), expert_in(map, e.to));
      break;
    }
    loads = std::move(after);
  }
  return {std::move(map), loads.max()};
}

/// All replicas in descending order of load: each spare slot is assigned to the expert with the highest load per replica.
std::vector<int> replicas_by_load(Routes routes, const ExpertMap& sizes, std::vector<int>& count) {
  // Compares loads per replica by cross-multiplication; an expert has at most as many replicas as there are ranks.
  const auto is_higher = [&](int a, int b) {
    return routes[slot_idx(a)] * count[slot_idx(b)] > routes[slot_idx(b)] * count[slot_idx(a)];
  };
  count.assign(slot_idx(sizes.num_experts), 1);
  for (int spare = sizes.num_slots() - sizes.num_experts; spare > 0; --spare) {
    int highest = -1;
    for (int e = 0; e < sizes.num_experts; ++e)
      if (count[slot_idx(e)] < sizes.world && (highest < 0 || is_higher(e, highest))) highest = e;
    if (highest < 0) break;
    ++count[slot_idx(highest)];
  }
  std::vector<int> all;
  for (int e = 0; e < sizes.num_experts; ++e) all.insert(all.end(), slot_idx(count[slot_idx(e)]), e);
  std::stable_sort(all.begin(), all.end(), is_higher);
  return all;
}

/// Places each replica on the least loaded rank with an empty slot, preferring ranks without the expert.
std::vector<std::vector<int>> pack(Routes routes, const ExpertMap& sizes) {
  std::vector<int> count;
  std::vector<std::vector<int>> packs(slot_idx(sizes.world));
  std::vector<int64_t> load(packs.size(), 0);
  for (const int e : replicas_by_load(routes, sizes, count)) {
    size_t to = packs.size();
    bool again = true;  // rank `to` already holds the expert
    for (size_t r = 0; r < packs.size(); ++r) {
      if (static_cast<int>(packs[r].size()) == sizes.slots_per_rank) continue;
      const bool has = std::find(packs[r].begin(), packs[r].end(), e) != packs[r].end();
      if (to != packs.size() && (has != again ? has : load[r] >= load[to])) continue;
      to = r;
      again = has;
    }
    packs[to].push_back(e);
    load[to] += routes[slot_idx(e)] / count[slot_idx(e)];
  }
  return packs;
}

/// Assigns each pack to a rank, starting with the pairs that share the most experts; experts that remain on a rank keep their
/// slots.
ExpertMap settle(std::vector<std::vector<int>> packs, const ExpertMap& current) {
  struct Match {
    int different, pack, rank;
    auto operator<=>(const Match&) const = default;
  };
  std::vector<Match> matches;
  for (int a = 0; a < current.world; ++a)
    for (int r = 0; r < current.world; ++r) {
      const auto& experts = packs[slot_idx(a)];
      const auto same = std::count_if(experts.begin(), experts.end(), [&](int e) { return holds(current, r, e); });
      matches.push_back({current.slots_per_rank - static_cast<int>(same), a, r});
    }
  std::sort(matches.begin(), matches.end());
  std::vector<char> is_placed(packs.size(), 0), is_taken(packs.size(), 0);
  ExpertMap map = current;
  std::fill(map.expert_of_slot.begin(), map.expert_of_slot.end(), -1);
  for (const Match& match : matches) {
    if (is_placed[slot_idx(match.pack)] != 0 || is_taken[slot_idx(match.rank)] != 0) continue;
    is_placed[slot_idx(match.pack)] = is_taken[slot_idx(match.rank)] = 1;
    std::vector<int>& experts = packs[slot_idx(match.pack)];
    for (int p = match.rank * map.slots_per_rank; p < (match.rank + 1) * map.slots_per_rank; ++p) {
      const auto stays = std::find(experts.begin(), experts.end(), current.expert_of_slot[slot_idx(p)]);
      if (stays == experts.end()) continue;
      expert_in(map, p) = *stays;
      experts.erase(stays);
    }
    for (const int e : experts) expert_in(map, empty_slot(map, match.rank, current, e)) = e;
  }
  return map;
}

enum class Changes { all, replicas };  ///< replicas: each expert keeps one of its slots

ExpertMap choose_map(Changes changes, std::span<const int64_t> routes_per_expert, const ExpertMap& current, double tolerance) {
  const int64_t load_now = divide_routes(current, routes_per_expert).max();  // validates the arguments
  if (!(tolerance >= 0) || !std::isfinite(tolerance))
    throw Error(ErrorCode::invalid_argument,
                "tolerance = " + std::to_string(tolerance) + ": must be a finite number of at least 0");
  const int64_t total = std::accumulate(routes_per_expert.begin(), routes_per_expert.end(), int64_t{0});
  const int64_t bound = (total + current.world - 1) / current.world;  // lower bound of the maximum rank load
  const auto allowed = static_cast<int64_t>(std::min(tolerance, 64.0) * static_cast<double>(total) / current.world);
  if (load_now <= bound + allowed) return current;
  const int exchanges = changes == Changes::all ? kMaxExchanges : 0;
  std::vector<Plan> plans{
      {current, load_now},
      refine(routes_per_expert, with_replicas(routes_per_expert, current, current), exchanges),
      refine(routes_per_expert, with_replicas(routes_per_expert, without_replicas(current), current), exchanges)};
  const auto lowest = [&] {
    return std::min_element(plans.begin(), plans.end(), [](const Plan& a, const Plan& b) { return a.load < b.load; })->load;
  };
  if (changes == Changes::all && lowest() > bound + allowed)
    plans.push_back(refine(routes_per_expert, settle(pack(routes_per_expert, current), current), exchanges));
  const int64_t max = lowest() + allowed;
  const Plan* chosen = nullptr;
  int min_moved = 0;
  for (const Plan& plan : plans) {
    if (plan.load > max) continue;
    const int moved = count_moved(current, plan.map);
    if (chosen != nullptr && moved >= min_moved) continue;
    chosen = &plan;
    min_moved = moved;
  }
  return chosen->map;
}

}  // namespace

ExpertMap plan_experts(std::span<const int64_t> routes_per_expert, const ExpertMap& current, double tolerance) {
  return choose_map(Changes::all, routes_per_expert, current, tolerance);
}

ExpertMap plan_replicas(std::span<const int64_t> routes_per_expert, const ExpertMap& current, double tolerance) {
  return choose_map(Changes::replicas, routes_per_expert, current, tolerance);
}

}  // namespace switchyard

// SPDX-License-Identifier: Apache-2.0
// Maps of replicated experts: their checks, the division of routes over replicas, and the planner, compared with EPLB.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>

#include "harness/outcome.hpp"
#include "switchyard/expert_map.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/routing.hpp"

namespace switchyard {
namespace {

using harness::expect_text;
using harness::outcome_of;

size_t idx(int64_t i) { return static_cast<size_t>(i); }

void expect_refused(const std::string& text, const std::function<void()>& call) {
  expect_text(outcome_of(call), ErrorCode::invalid_argument, text);
}

/// A valid map in which every expert has 1 to 4 slots, some of them on the same rank.
ExpertMap random_map(std::mt19937_64& random, int world, int num_experts) {
  const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
  const int home = (num_experts + world - 1) / world;
  ExpertMap map{num_experts, world, home + draw(3 * home + 1), {}};
  std::vector<int32_t> all(idx(map.num_slots()), -1);
  std::iota(all.begin(), all.begin() + num_experts, 0);
  for (size_t p = idx(num_experts); p < all.size(); ++p)
    if (draw(4) != 0) all[p] = draw(num_experts);
  std::shuffle(all.begin(), all.end(), random);
  map.expert_of_slot = all;
  return map;
}

std::vector<int64_t> random_routes(std::mt19937_64& random, size_t count, uint64_t max) {
  std::vector<int64_t> routes(count);
  for (int64_t& n : routes) n = random() % 4 == 0 ? 0 : static_cast<int64_t>(random() % max);
  return routes;
}

/// The ranks that hold an expert.
std::vector<std::vector<int>> ranks_of(const ExpertMap& map) {
  std::vector<std::vector<int>> ranks(idx(map.num_experts));
  for (int p = 0; p < map.num_slots(); ++p) {
    const int e = map.expert_of_slot[idx(p)];
    if (e >= 0 && (ranks[idx(e)].empty() || ranks[idx(e)].back() != p / map.slots_per_rank))
      ranks[idx(e)].push_back(p / map.slots_per_rank);
  }
  return ranks;
}

/// The lowest possible load of the busiest rank, by Hall's condition: for every set of ranks, the routes of the experts that
/// only these ranks hold, divided by the number of ranks.
int64_t lowest_max(const ExpertMap& map, const std::vector<int64_t>& routes) {
  int64_t lowest = 0;
  const auto ranks = ranks_of(map);
  for (uint64_t set = 1; set < uint64_t{1} << map.world; ++set) {
    int64_t sum = 0;
    for (size_t e = 0; e < ranks.size(); ++e)
      if (std::all_of(ranks[e].begin(), ranks[e].end(), [&](int r) { return (set >> r & 1) != 0; })) sum += routes[e];
    const int64_t size = std::popcount(set);
    lowest = std::max(lowest, (sum + size - 1) / size);
  }
  return lowest;
}

TEST(ExpertMaps, HomeIsThatOfTheExchange) {
  for (const int world : {1, 3, 8})
    for (const int experts : {1, 7, 64}) {
      const int slots = (experts + world - 1) / world + 2;
      const ExpertMap map = home_map(experts, world, slots);
      check_expert_map(map);
      for (int r = 0; r < world; ++r) {
        const int first = first_expert(experts, world, r), count = first_expert(experts, world, r + 1) - first;
        for (int i = 0; i < slots; ++i) EXPECT_EQ(map.expert_of_slot[idx(r * slots + i)], i < count ? first + i : -1);
      }
      EXPECT_EQ(count_moved(map, map), 0);
    }
}

TEST(ExpertMaps, MistakesAreNamed) {
  expect_refused("ExpertMap::world = 0", [] { home_map(4, 0, 4); });
  expect_refused("ExpertMap::world = 65", [] { home_map(4, 65, 4); });
  expect_refused("ExpertMap::num_experts = 0", [] { home_map(0, 2, 4); });
  expect_refused("ExpertMap::slots_per_rank = 3: must be in [4, 524288] for 7 experts on 2 ranks", [] { home_map(7, 2, 3); });
  ExpertMap map = home_map(4, 2, 3);
  const std::vector<int64_t> routes{1, 2, 3, 4};
  map.expert_of_slot[2] = 4;
  expect_refused("expert_of_slot[2] is 4: must be in [-1, 4)", [&] { check_expert_map(map); });
  map.expert_of_slot[2] = -1;
  map.expert_of_slot[4] = -1;
  expect_refused("no slot of expert 3", [&] { divide_routes(map, routes); });
  map.expert_of_slot.pop_back();
  expect_refused("has 5 elements: must be 6", [&] { plan_experts(routes, map); });
  map = home_map(4, 2, 3);
  expect_refused("routes_per_expert has 3 elements: must be 4", [&] { plan_experts(std::vector<int64_t>{1, 2, 3}, map); });
  expect_refused("routes_per_expert[1] is -2", [&] { divide_routes(map, std::vector<int64_t>{1, -2, 3, 4}); });
  expect_refused("routes has 4 elements: must be 8", [&] { divide_source(map, routes, 0); });
  expect_refused("source = 2: must be in [0, 2)", [&] { divide_source(map, std::vector<int64_t>(8), 2); });
  expect_refused("tolerance = -1", [&] { plan_experts(routes, map, -1); });
  expect_refused("different numbers", [&] { count_moved(map, home_map(4, 2, 4)); });
}

TEST(ExpertMaps, DivisionsAreLevel) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 400; ++i) {
    const int world = 1 + i % 8;
    const ExpertMap map = random_map(random, world, 1 + i * 7 % 23);
    const auto routes = random_routes(random, idx(map.num_experts), i % 3 == 0 ? 5 : 10000);
    const SlotLoads loads = divide_routes(map, routes);
    std::vector<int64_t> of_expert(routes.size(), 0), of_rank(idx(world), 0);
    for (int p = 0; p < map.num_slots(); ++p) {
      const int64_t n = loads.of_slot[idx(p)];
      ASSERT_GE(n, 0);
      ASSERT_TRUE(n == 0 || map.expert_of_slot[idx(p)] >= 0);
      of_rank[idx(p / map.slots_per_rank)] += n;
      if (map.expert_of_slot[idx(p)] >= 0) of_expert[idx(map.expert_of_slot[idx(p)])] += n;
    }
    ASSERT_EQ(of_expert, routes);
    ASSERT_EQ(of_rank, loads.of_rank);
    ASSERT_EQ(loads.max(), lowest_max(map, routes)) << "map " << i;
  }
}

/// Expert r is on ranks r and r + 1, so routes move along a chain of all ranks.
TEST(ExpertMaps, ChainsAreLevel) {
  for (const int world : {2, 16, 64})
    for (const int64_t routes : {3, 200, 100000}) {
      ExpertMap map{world - 1, world, 2, std::vector<int32_t>(idx(2 * world), -1)};
      for (int e = 0; e < map.num_experts; ++e) map.expert_of_slot[idx(2 * e + 1)] = map.expert_of_slot[idx(2 * e + 2)] = e;
      const std::vector<int64_t> all(idx(world - 1), routes);
      EXPECT_EQ(divide_routes(map, all).max(), (routes * (world - 1) + world - 1) / world);
    }
}

TEST(ExpertMaps, SourcesShareTheDivision) {
  std::mt19937_64 random(8);
  for (int i = 0; i < 200; ++i) {
    const int world = 1 + i % 8;
    const ExpertMap map = random_map(random, world, 1 + i * 5 % 17);
    const size_t experts = idx(map.num_experts);
    const auto routes = random_routes(random, experts * idx(world), 50);
    std::vector<int64_t> sums(experts, 0), of_slot(idx(map.num_slots()), 0);
    for (size_t at = 0; at < routes.size(); ++at) sums[at % experts] += routes[at];
    const SlotLoads loads = divide_routes(map, sums);
    for (int s = 0; s < world; ++s) {
      const SlotRuns mine = divide_source(map, routes, s);
      ASSERT_EQ(mine.begin.size(), experts + 1);
      for (size_t e = 0; e < experts; ++e) {
        int64_t sum = 0, own = 0;
        for (size_t at = mine.begin[e]; at < mine.begin[e + 1]; ++at) {
          const auto [slot, count] = mine.runs[at];
          ASSERT_GT(count, 0);
          ASSERT_EQ(map.expert_of_slot[idx(slot)], static_cast<int32_t>(e));
          if (slot / map.slots_per_rank == s) {
            ASSERT_EQ(at, mine.begin[e]) << "own slots come first";
            own = std::min(loads.of_slot[idx(slot)], routes[idx(s) * experts + e]);
            ASSERT_EQ(count, own);
          }
          of_slot[idx(slot)] += count;
          sum += count;
        }
        ASSERT_EQ(sum, routes[idx(s) * experts + e]);
      }
    }
    ASSERT_EQ(of_slot, loads.of_slot);
  }
}

TEST(ExpertMaps, IdsBecomeSlots) {
  // Expert 0 is on ranks 0 and 1, expert 1 on rank 1; rank 1 has three of the five routes to expert 0.
  const ExpertMap map{2, 2, 2, {0, -1, 1, 0}};
  const std::vector<int64_t> routes{2, 0, 3, 1};
  ASSERT_EQ(divide_routes(map, std::vector<int64_t>{5, 1}).of_slot, (std::vector<int64_t>{3, 0, 1, 2}));
  const SlotRuns runs = divide_source(map, routes, 1);
  std::vector<int32_t> ids{0, -1, 0, 1, 0};
  replace_by_slots(ids, runs);
  EXPECT_EQ(ids, (std::vector<int32_t>{3, -1, 3, 2, 0}));
  expect_refused("ids[1] is 2: must be -1 or an expert in [0, 2)", [&] { replace_by_slots(ids = {0, 2}, runs); });
  expect_refused("ids[0] is -2", [&] { replace_by_slots(ids = {-2}, runs); });
  expect_refused("more routes to expert 0", [&] { replace_by_slots(ids = {0, 0, 0, 0}, runs); });
  expect_refused("more routes to expert 1", [&] { replace_by_slots(ids = {1}, divide_source(map, routes, 0)); });
}

// ---- The planner ----

constexpr int kExperts = 256, kWorld = 32, kSlots = 10;

uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

/// The same loads as loads_of() in eplb_balance.py.
std::vector<int64_t> loads_of(uint64_t seed) {
  std::vector<int64_t> place(kExperts), order(kExperts), loads(kExperts);
  std::vector<uint64_t> keys(kExperts);
  for (size_t e = 0; e < kExperts; ++e) keys[e] = mixed(mixed(seed) ^ e);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return keys[idx(a)] < keys[idx(b)]; });
  for (size_t i = 0; i < kExperts; ++i) place[idx(order[i])] = static_cast<int64_t>(i);
  for (size_t e = 0; e < kExperts; ++e) {
    const auto wide = static_cast<int64_t>(keys[e] % 1000), m = static_cast<int64_t>(keys[e] % 100), r = 1 + place[e];
    const int64_t all[] = {1000 + wide, 1 + m * m, 1 + m * m * m * m / 1000, 1000000 / r, 100000000 / (r * r)};
    loads[e] = all[seed % 5];
  }
  return loads;
}

std::vector<int64_t> recorded_loads() {
  const RoutingFile file = RoutingFile::open(SWITCHYARD_SOURCE_DIR "/data/routing/moe_lm_e256_k8_layer3.safetensors");
  std::vector<int64_t> loads(kExperts, 0);
  for (int r = 0; r < file.ranks(3); ++r)
    for (const int32_t id : file.read(3, r).topk_ids)
      if (id >= 0) ++loads[idx(id)];
  return loads;
}

struct Balanced {
  std::string name;
  std::vector<int64_t> loads;
  double ratio;  ///< busiest rank over mean
  std::vector<int32_t> slots;
  double mean() const { return static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0})) / kWorld; }
};

std::vector<Balanced> balanced_by_eplb() {
  std::ifstream file(SWITCHYARD_SOURCE_DIR "/tests/unit/plan/eplb_balance.txt");
  std::vector<Balanced> all;
  Balanced b;
  for (std::string slots; file >> b.name >> b.ratio >> slots; b.slots.clear()) {
    for (size_t at = 0; at < slots.size(); at += 2) b.slots.push_back(std::stoi(slots.substr(at, 2), nullptr, 16));
    b.loads = b.name == "recorded" ? recorded_loads() : loads_of(std::stoull(b.name));
    all.push_back(b);
  }
  return all;
}

/// The file belongs to these loads: its maps have its ratios if routes are divided evenly over the slots.
TEST(ExpertPlanner, FileOfEplb) {
  for (const Balanced& b : balanced_by_eplb()) {
    ASSERT_EQ(b.slots.size(), idx(kWorld * kSlots));
    std::vector<double> of_rank(kWorld, 0);
    for (size_t p = 0; p < b.slots.size(); ++p)
      of_rank[p / kSlots] += static_cast<double>(b.loads[idx(b.slots[p])]) /
                             static_cast<double>(std::count(b.slots.begin(), b.slots.end(), b.slots[p]));
    EXPECT_NEAR(*std::max_element(of_rank.begin(), of_rank.end()) / b.mean(), b.ratio, 1e-6) << b.name;
    // Our division of the same map is at least as good.
    EXPECT_LE(static_cast<double>(divide_routes({kExperts, kWorld, kSlots, b.slots}, b.loads).max()),
              b.ratio * b.mean() + kWorld);
  }
}

TEST(ExpertPlanner, BalancesAtLeastLikeEplb) {
  const ExpertMap home = home_map(kExperts, kWorld, kSlots);
  const auto all = balanced_by_eplb();
  ASSERT_EQ(all.size(), 201u);
  int moved = 0, moved_for_best = 0;
  for (const Balanced& b : all) {
    const double bound = std::ceil(b.mean());  // whole routes
    const ExpertMap best = plan_experts(b.loads, home, 0), by_default = plan_experts(b.loads, home);
    check_expert_map(best);
    check_expert_map(by_default);
    const auto load = static_cast<double>(divide_routes(best, b.loads).max());
    EXPECT_LE(load, std::max(b.ratio * b.mean() * (1 + 1e-6), bound)) << b.name;
    EXPECT_LE(static_cast<double>(divide_routes(by_default, b.loads).max()), load + 0.02 * b.mean()) << b.name;
    moved += count_moved(home, by_default);
    moved_for_best += count_moved(home, best);
    const ExpertMap eplb{kExperts, kWorld, kSlots, b.slots};
    EXPECT_GT(count_moved(home, eplb), 260) << b.name;
  }
  RecordProperty("moved_by_default", moved);
  RecordProperty("moved_for_best", moved_for_best);
  EXPECT_LE(moved, 201 * 50);
  EXPECT_LE(moved_for_best, 201 * 180);
}

/// Loads that change by up to a fifth between plans.
TEST(ExpertPlanner, ReplansMoveLittle) {
  std::vector<int64_t> loads = loads_of(3);
  ExpertMap map = plan_experts(loads, home_map(kExperts, kWorld, kSlots));
  std::mt19937_64 random(3);
  for (int i = 0; i < 10; ++i) {
    for (int64_t& n : loads) n = n * static_cast<int64_t>(800 + random() % 401) / 1000;
    const ExpertMap next = plan_experts(loads, map);
    EXPECT_LE(count_moved(map, next), 64) << "step " << i;
    map = next;
  }
}

/// Plans of replicas leave a slot of each expert as it is, and empty slots after vacate() are those that change.
TEST(ExpertPlanner, ReplicasInTheBackground) {
  std::mt19937_64 random(21);
  int moved = 0;
  for (int i = 0; i < 200; ++i) {
    const int world = 1 + i % 9, experts = 1 + i * 7 % 40, home = (experts + world - 1) / world;
    const ExpertMap current = i % 2 == 0 ? home_map(experts, world, home + i % 4) : random_map(random, world, experts);
    const auto routes = random_routes(random, idx(experts), 100000);
    const double tolerance = i % 3 == 0 ? 0 : 0.05;
    const ExpertMap planned = plan_replicas(routes, current, tolerance), vacated = vacate(current, planned);
    check_expert_map(planned);
    check_expert_map(vacated);
    for (size_t p = 0; p < vacated.expert_of_slot.size(); ++p)
      ASSERT_EQ(vacated.expert_of_slot[p],
                planned.expert_of_slot[p] == current.expert_of_slot[p] ? current.expert_of_slot[p] : -1);
    ASSERT_LE(divide_routes(planned, routes).max(), divide_routes(current, routes).max());
    ASSERT_EQ(plan_replicas(routes, planned, 0.05), planned) << "a plan that is good enough stays";
    moved += count_moved(current, planned);
  }
  EXPECT_GT(moved, 200);
  expect_refused("expert 0 keeps no slot", [] { vacate({2, 2, 1, {0, 1}}, {2, 2, 1, {1, 0}}); });
  expect_refused("vacate: the maps have different numbers", [] { vacate(home_map(4, 2, 2), home_map(4, 2, 3)); });
  expect_refused("has no slot of expert 1", [] { vacate({2, 2, 1, {0, 0}}, {2, 2, 1, {0, 1}}); });
}

TEST(ExpertPlanner, AnyShape) {
  std::mt19937_64 random(9);
  for (int i = 0; i < 200; ++i) {
    const int world = 1 + i % 9, experts = 1 + i * 11 % 40, home = (experts + world - 1) / world;
    const ExpertMap current = i % 2 == 0 ? home_map(experts, world, home + i % 4) : random_map(random, world, experts);
    auto routes = random_routes(random, idx(experts), i % 5 == 0 ? 2 : 100000);
    if (i % 7 == 0) std::fill(routes.begin(), routes.end(), 0);
    if (i % 7 == 1) routes[idx(experts / 2)] = int64_t{1} << 40;
    const ExpertMap planned = plan_experts(routes, current, i % 3 == 0 ? 0 : 0.05);
    check_expert_map(planned);
    ASSERT_EQ(planned, plan_experts(routes, current, i % 3 == 0 ? 0 : 0.05));
    ASSERT_LE(divide_routes(planned, routes).max(), divide_routes(current, routes).max());
    ASSERT_EQ(plan_experts(routes, planned, 0.05), planned) << "a plan that is good enough stays";
  }
}

}  // namespace
}  // namespace switchyard

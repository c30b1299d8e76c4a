// SPDX-License-Identifier: Apache-2.0
// The planner for one call: balance at the documented bound, with fewer slots, and compared with the best map of small cases;
// weights that stay; and the choice between leveling and fetching.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "harness/outcome.hpp"
#include "switchyard/expert_map.hpp"

namespace switchyard {
namespace {

using harness::expect_text;
using harness::outcome_of;
using Loads = std::vector<int64_t>;

size_t idx(int64_t i) { return static_cast<size_t>(i); }
int home_slots(int experts, int world) { return (experts + world - 1) / world; }

/// Fetches cost nothing.
StepOptions free_fetches(int64_t tile = 1) {
  StepOptions options;
  options.tile = tile;
  options.seconds_per_move = 0;
  return options;
}

/// Loads of various kinds: even, of one expert, of one or two ranks, skewed, sparse, and with hot experts.
Loads loads_of_kind(int kind, int experts, int world, std::mt19937_64& random) {
  const auto draw = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  const ExpertMap home = home_map(experts, world, home_slots(experts, world));
  const auto rank_of = [&](int e) {
    const auto at = std::find(home.expert_of_slot.begin(), home.expert_of_slot.end(), e) - home.expert_of_slot.begin();
    return static_cast<int>(at) / home.slots_per_rank;
  };
  const int one = static_cast<int>(draw(experts)), other = static_cast<int>(draw(experts));
  Loads loads(idx(experts), 0);
  for (int e = 0; e < experts; ++e) {
    const int64_t of_kind[] = {1000,
                               e == one ? 100'003 : 0,
                               rank_of(e) == rank_of(one) ? 1 + draw(5000) : 0,
                               rank_of(e) == rank_of(one) || rank_of(e) == rank_of(other) ? 777 : draw(2),
                               100'000 / (1 + (e + one) % experts),
                               draw(4) == 0 ? draw(100) : 0,
                               draw(10) == 0 ? draw(int64_t{1} << 40) : draw(1000),
                               draw(3)};
    loads[idx(e)] = of_kind[kind % 8];
  }
  return loads;
}

int64_t mean_of(const Loads& loads, int world) {
  return (std::accumulate(loads.begin(), loads.end(), int64_t{0}) + world - 1) / world;
}

/// The properties of every plan for a current map whose home slots are those of home_map().
void check_plan(const StepPlan& plan, const Loads& loads, const ExpertMap& current) {
  check_expert_map(plan.map);
  const ExpertMap home = home_map(current.num_experts, current.world, current.slots_per_rank);
  ASSERT_EQ(plan.map.slots_per_rank, current.slots_per_rank);
  for (size_t p = 0; p < home.expert_of_slot.size(); ++p)
    if (home.expert_of_slot[p] >= 0) {
      ASSERT_EQ(plan.map.expert_of_slot[p], home.expert_of_slot[p]) << "slot " << p;
    }
  ASSERT_EQ(plan.loads.of_rank, divide_routes(plan.map, loads).of_rank);
  ASSERT_EQ(plan.mean, mean_of(loads, current.world));
  ASSERT_EQ(plan.max_before, divide_routes(current, loads).max());
  ASSERT_LE(plan.loads.max(), plan.max_before);
  ASSERT_GE(plan.remainder(), 0);
  std::vector<int32_t> fetched;
  for (int p = 0; p < current.num_slots(); ++p) {
    const int32_t e = plan.map.expert_of_slot[idx(p)];
    const auto mine = current.expert_of_slot.begin() + p / current.slots_per_rank * current.slots_per_rank;
    if (e >= 0 && std::find(mine, mine + current.slots_per_rank, e) == mine + current.slots_per_rank)
      fetched.push_back(p);
    else
      ASSERT_EQ(e, current.expert_of_slot[idx(p)]) << "the weights of slot " << p << " moved although the rank has them";
  }
  ASSERT_EQ(plan.fetched, fetched);
}

TEST(StepPlanner, TheBoundLevelsEveryLoad) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 10'000; ++i) {
    const int world = 1 + i % 9, experts = 1 + i * 7 % 41, kind = i / 9;
    const int spare = spare_slots_to_level(experts, world);
    const Loads loads = loads_of_kind(kind, experts, world, random);
    const ExpertMap home = home_map(experts, world, home_slots(experts, world) + spare);
    const int64_t tile = i % 4 == 0 ? 128 : 1;
    const StepPlan plan = plan_step(loads, home, 0, free_fetches(tile));
    ASSERT_NO_FATAL_FAILURE(check_plan(plan, loads, home)) << i;
    ASSERT_LE(plan.remainder(), tile) << i << ": " << experts << " experts on " << world << " ranks, kind " << kind % 8;
    const StepPlan again = plan_step(loads, home, 0, free_fetches(tile));
    ASSERT_EQ(again.map, plan.map);
    ASSERT_TRUE(plan_step(loads, plan.map, 0, free_fetches(tile)).fetched.empty()) << "the weights are already in place";
    // Replicas of another call occupy all slots.
    const Loads next = loads_of_kind(kind + 1, experts, world, random);
    const StepPlan after = plan_step(next, plan.map, 0, free_fetches(tile));
    ASSERT_NO_FATAL_FAILURE(check_plan(after, next, plan.map)) << i;
    ASSERT_LE(after.remainder(), tile) << i << " after other replicas";
  }
}

TEST(StepPlanner, TheBoundIsTight) {
  EXPECT_EQ(spare_slots_to_level(256, 32), 8);
  EXPECT_EQ(spare_slots_to_level(256, 8), 28);
  EXPECT_EQ(spare_slots_to_level(128, 2), 32);
  EXPECT_EQ(spare_slots_to_level(7, 3), 2);
  EXPECT_EQ(spare_slots_to_level(5, 1), 0);
  EXPECT_EQ(spare_slots_to_level(3, 8), 1);
  for (const auto& [experts, world] : {std::pair{64, 4}, {128, 2}, {24, 8}, {9, 9}}) {
    // All ranks but the last have the mean and more, in equal experts; the last has none.
    Loads loads(idx(experts), 1000);
    std::fill(loads.end() - experts / world, loads.end(), 0);
    const int spare = spare_slots_to_level(experts, world), own = experts / world;
    EXPECT_LE(plan_step(loads, home_map(experts, world, own + spare), 0, free_fetches()).remainder(), 1);
    EXPECT_GT(plan_step(loads, home_map(experts, world, own + spare - 1), 0, free_fetches()).remainder(), 1);
  }
}

/// Rank 1 holds replicas that have rows but would occupy its slots without leveling the ranks.
TEST(StepPlanner, ReplicasInPlaceDoNotPreventALevelPlan) {
  const Loads loads{1800, 760, 380, 60, 0, 0, 0, 0};
  ExpertMap current = home_map(8, 2, 6);
  current.expert_of_slot[10] = 1;
  current.expert_of_slot[11] = 2;
  ASSERT_EQ(spare_slots_to_level(8, 2), 2);
  const StepPlan plan = plan_step(loads, current, 0, free_fetches());
  check_plan(plan, loads, current);
  EXPECT_LE(plan.remainder(), 1);
  EXPECT_EQ(plan.fetched.size(), 1u);
}

TEST(StepPlanner, FewerSlots) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 2000; ++i) {
    const int world = 1 + i % 9, experts = 1 + i * 7 % 41;
    const Loads loads = loads_of_kind(i / 9, experts, world, random);
    const ExpertMap home = home_map(experts, world, home_slots(experts, world));
    if (experts % world == 0) {
      ASSERT_EQ(plan_step(loads, home, 0, free_fetches()).map, home) << "no spare slots";
    }
    ExpertMap current = home_map(experts, world, home_slots(experts, world) + 1);
    for (int step = 0; step < 3; ++step) {
      const Loads now = step == 0 ? loads : loads_of_kind(i / 9 + step, experts, world, random);
      const StepPlan plan = plan_step(now, current, 0, free_fetches());
      ASSERT_NO_FATAL_FAILURE(check_plan(plan, now, current)) << i;
      current = plan.map;
    }
  }
}

/// The lowest maximum rank load of all maps with one spare slot per rank and fixed home slots.
int64_t best_of_all(const Loads& loads, ExpertMap map, int rank = 0) {
  if (rank == map.world) return divide_routes(map, loads).max();
  int64_t best = std::numeric_limits<int64_t>::max();
  const size_t spare = idx((rank + 1) * map.slots_per_rank - 1);
  for (int e = 0; e < map.num_experts; ++e) {
    map.expert_of_slot[spare] = e;
    best = std::min(best, best_of_all(loads, map, rank + 1));
  }
  return best;
}

TEST(StepPlanner, IsNearTheBestMapOfSmallCases) {
  std::mt19937_64 random(3);
  double sum = 0, worst = 0;
  int best = 0;
  constexpr int kCases = 200;
  for (int i = 0; i < kCases; ++i) {
    const int world = 2 + i % 2, experts = world * (3 + i / 2 % 2);
    Loads loads(idx(experts));
    for (int64_t& n : loads) n = static_cast<int64_t>(1 + random() % 1000) * (random() % 3 == 0 ? 5 : 1);
    const ExpertMap home = home_map(experts, world, experts / world + 1);
    const StepPlan plan = plan_step(loads, home, 0, free_fetches());
    const int64_t lowest = best_of_all(loads, home);
    ASSERT_GE(plan.loads.max(), lowest);
    const double over =
        static_cast<double>(plan.loads.max() - std::max(lowest, plan.mean + 1)) / static_cast<double>(plan.mean);
    best += over <= 0 ? 1 : 0;
    sum += std::max(over, 0.0);
    worst = std::max(worst, over);
  }
  RecordProperty("best", best);
  RecordProperty("worst", std::to_string(worst));
  EXPECT_GE(best, kCases * 9 / 10);
  EXPECT_LE(sum / kCases, 0.005);
  EXPECT_LE(worst, 0.1);
}

/// Popular experts on the first ranks, one spare slot each.
TEST(StepPlanner, OneSlot) {
  double sum = 0;
  for (int tenths = 3; tenths < 18; ++tenths) {
    Loads loads(128);
    for (size_t e = 0; e < loads.size(); ++e) loads[e] = std::llround(1e5 * std::pow(e + 1, -0.1 * tenths));
    const StepPlan plan = plan_step(loads, home_map(128, 8, 17), 0, free_fetches());
    sum += static_cast<double>(plan.loads.max()) / static_cast<double>(plan.mean);
  }
  RecordProperty("mean_ratio", std::to_string(sum / 15));
  EXPECT_LE(sum / 15, 1.25);
}

TEST(StepPlanner, LargeSizes) {
  std::mt19937_64 random(4);
  for (const auto& [experts, world, spare] : {std::tuple{256, 32, 8}, {256, 32, 4}, {250, 32, 8}, {512, 64, 8}})
    for (int kind = 0; kind < 8; ++kind) {
      const Loads loads = loads_of_kind(kind, experts, world, random);
      const ExpertMap home = home_map(experts, world, home_slots(experts, world) + spare);
      const StepPlan plan = plan_step(loads, home, 0, free_fetches());
      ASSERT_NO_FATAL_FAILURE(check_plan(plan, loads, home));
      if (spare == 8) {
        EXPECT_LE(plan.remainder(), 1) << kind;
      }
    }
}

/// Loads that change by up to a tenth between calls: most of the weights stay.
TEST(StepPlanner, WeightsThatAreInPlaceArePreferred) {
  std::mt19937_64 random(5);
  Loads loads = loads_of_kind(4, 256, 32, random);
  ExpertMap current = home_map(256, 32, 10);
  size_t first = 0, later = 0;
  for (int step = 0; step < 9; ++step) {
    const StepPlan plan = plan_step(loads, current, 0, free_fetches(256));
    (step == 0 ? first : later) += plan.fetched.size();
    current = plan.map;
    for (int64_t& n : loads) n = n * static_cast<int64_t>(900 + random() % 201) / 1000;
  }
  EXPECT_GT(first, 20u);
  EXPECT_LE(later, 8 * first / 2);
}

TEST(StepPlanner, FetchesMustPay) {
  // Expert 0 has 1000 rows and 500 of them fit on rank 1: 500 rows less for one fetch.
  const ExpertMap home = home_map(2, 2, 2);
  const Loads loads{1000, 0};
  StepOptions options;
  options.tile = 1;
  options.seconds_per_row = 1e-6;
  options.link_bytes_per_s = 1e9;
  options.seconds_per_move = 1e-4;  // leaves 399 us of the 499 us saved beyond a tile
  EXPECT_EQ(plan_step(loads, home, 398e3, options).map, (ExpertMap{2, 2, 2, {0, -1, 1, 0}}));
  EXPECT_EQ(plan_step(loads, home, 400e3, options).map, home);
  options.seconds_per_move = 6e-4;
  EXPECT_EQ(plan_step(loads, home, 0, options).map, home);

  // One rank fetches both experts, or one of them, or none.
  const ExpertMap wide = home_map(4, 2, 4);
  const Loads two{1000, 600, 0, 0};
  options.seconds_per_move = 0;
  EXPECT_EQ(plan_step(Loads{400, 400, 0, 0}, wide, 10e3, options).fetched.size(), 1u) << "one suffices";
  const Loads equal{400, 400, 400, 0, 0, 0};
  EXPECT_EQ(plan_step(equal, home_map(6, 2, 5), 10e3, options).fetched.size(), 2u);
  EXPECT_EQ(plan_step(equal, home_map(6, 2, 5), 300e3, options).fetched.size(), 1u) << "the second saves 199 us only";
  EXPECT_EQ(plan_step(equal, home_map(6, 2, 5), 500e3, options).fetched.size(), 0u);
}

/// All ranks fetch from the only one that holds the expert.
TEST(StepPlanner, ASenderLimitsFetches) {
  const ExpertMap home = home_map(8, 8, 2);
  Loads loads(8, 0);
  loads[3] = 8000;
  StepOptions options = free_fetches();
  options.seconds_per_row = 1e-6;
  options.link_bytes_per_s = 1e9;
  EXPECT_EQ(plan_step(loads, home, 0.1e6, options).fetched.size(), 7u) << "at most 700 us for at least 1000 rows less each";
  EXPECT_EQ(plan_step(loads, home, 0.99e6, options).fetched.size(), 2u) << "a third each: 2667 + 2 * 990 us";
  EXPECT_EQ(plan_step(loads, home, 4.1e6, options).fetched.size(), 0u) << "one fetch saves 4000 us";
}

/// Random rates: the predicted time of the plan is never longer than that of the current map.
TEST(StepPlanner, NeverTakesLonger) {
  std::mt19937_64 random(6);
  for (int i = 0; i < 2000; ++i) {
    const int world = 1 + i % 8, experts = 1 + i * 5 % 37;
    ExpertMap current = home_map(experts, world, home_slots(experts, world) + i % 5);
    StepOptions options;
    options.tile = 1 + i % 200;
    options.seconds_per_row = 1e-7 * static_cast<double>(random() % 100);
    options.seconds_per_move = 1e-6 * static_cast<double>(random() % 1000);
    const double expert_bytes = static_cast<double>(random() % 100'000'000);
    for (int step = 0; step < 3; ++step) {
      const Loads loads = loads_of_kind(i / 8 + step, experts, world, random);
      const StepPlan plan = plan_step(loads, current, expert_bytes, options);
      ASSERT_NO_FATAL_FAILURE(check_plan(plan, loads, current));
      const double saved = static_cast<double>(plan.max_before - plan.loads.max()) * options.seconds_per_row;
      std::vector<int> received(idx(world), 0);
      for (const int32_t p : plan.fetched) ++received[idx(p / current.slots_per_rank)];
      const int max = *std::max_element(received.begin(), received.end());
      const double cost = max == 0 ? 0 : max * expert_bytes / options.link_bytes_per_s + options.seconds_per_move;
      ASSERT_GE(saved * (1 + 1e-9), cost) << i;
      current = plan.map;
    }
  }
}

/// Any current map: each expert keeps a slot.
TEST(StepPlanner, AnyMap) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 500; ++i) {
    const int world = 1 + i % 6, experts = 1 + i * 5 % 19;
    ExpertMap map = home_map(experts, world, home_slots(experts, world) + i % 4);
    for (int32_t& e : map.expert_of_slot)
      if (e < 0 && random() % 2 == 0) e = static_cast<int32_t>(random() % static_cast<uint64_t>(experts));
    std::shuffle(map.expert_of_slot.begin(), map.expert_of_slot.end(), random);
    const Loads loads = loads_of_kind(i, experts, world, random);
    const StepPlan plan = plan_step(loads, map, 0, free_fetches());
    check_expert_map(plan.map);
    ASSERT_LE(plan.loads.max(), plan.max_before);
    for (int e = 0; e < experts; ++e) {
      bool stays = false;
      for (size_t p = 0; p < map.expert_of_slot.size(); ++p)
        stays |= map.expert_of_slot[p] == e && plan.map.expert_of_slot[p] == e;
      ASSERT_TRUE(stays) << "expert " << e;
    }
  }
}

TEST(StepPlanner, MistakesAreNamed) {
  const ExpertMap home = home_map(2, 2, 2);
  const auto refused = [&](const char* text, const Loads& loads, double bytes, const StepOptions& options) {
    expect_text(outcome_of([&] { plan_step(loads, home, bytes, options); }), ErrorCode::invalid_argument, text);
  };
  refused("routes_per_expert has 1 elements", {1}, 0, {});
  refused("routes_per_expert[1] is -1", {1, -1}, 0, {});
  refused("expert_bytes = -1", {1, 1}, -1, {});
  refused("expert_bytes = nan", {1, 1}, std::nan(""), {});
  refused("StepOptions::tile = 0", {1, 1}, 0, {.tile = 0});
  refused("StepOptions::tile = 1099511627777: must be in [1, 2^40]", {1, 1}, 0, {.tile = (int64_t{1} << 40) + 1});
  refused("StepOptions::link_bytes_per_s = 0", {1, 1}, 0, {.link_bytes_per_s = 0});
  refused("StepOptions::seconds_per_row = -1", {1, 1}, 0, {.seconds_per_row = -1});
  refused("StepOptions::seconds_per_move = inf", {1, 1}, 0, {.seconds_per_move = INFINITY});
  expect_text(outcome_of([] { spare_slots_to_level(0, 2); }), ErrorCode::invalid_argument, "0 experts on 2 ranks");
  expect_text(outcome_of([] { spare_slots_to_level(4, 65); }), ErrorCode::invalid_argument, "4 experts on 65 ranks");
}

}  // namespace
}  // namespace switchyard

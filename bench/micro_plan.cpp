// SPDX-License-Identifier: Apache-2.0
// Time of planning replicas and of dividing routes on one core, for 256 experts on 32 ranks; unless otherwise stated, with two
// spare slots per rank. Measures CPU time, so other load on the machine has little effect.
#include <benchmark/benchmark.h>

#include <numeric>
#include <vector>

#include "switchyard/expert_map.hpp"
#include "switchyard/routing.hpp"

namespace switchyard {
namespace {

constexpr int kExperts = 256, kRanks = 32, kSlots = kExperts / kRanks + 2, kTokens = 4096;

/// [W, E] routes of all ranks; `exponent` of a Zipf distribution.
std::vector<int64_t> routes_of(double exponent) {
  GeneratorSpec spec;
  spec.pattern = Pattern::zipf;
  spec.zipf_exponent = exponent;
  spec.num_experts = kExperts;
  spec.topk = 8;
  spec.world = kRanks;
  std::vector<int64_t> routes(size_t{kRanks} * kExperts);
  for (int r = 0; r < kRanks; ++r)
    for (const int32_t id : generate(spec, r, kTokens).topk_ids)
      ++routes[static_cast<size_t>(r) * kExperts + static_cast<size_t>(id)];
  return routes;
}

std::vector<int64_t> per_expert(const std::vector<int64_t>& routes) {
  std::vector<int64_t> sums(kExperts);
  for (size_t i = 0; i < routes.size(); ++i) sums[i % kExperts] += routes[i];
  return sums;
}

// Arguments: exponent in tenths, tolerance in thousandths.
void plan(benchmark::State& state) {
  const auto loads = per_expert(routes_of(static_cast<double>(state.range(0)) / 10));
  const ExpertMap home = home_map(kExperts, kRanks, kSlots);
  ExpertMap planned;
  for (auto _ : state)
    benchmark::DoNotOptimize(planned = plan_experts(loads, home, static_cast<double>(state.range(1)) / 1000));
  const double mean = static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0})) / kRanks;
  state.counters["busiest"] = static_cast<double>(divide_routes(home, loads).max()) / mean;
  state.counters["with_replicas"] = static_cast<double>(divide_routes(planned, loads).max()) / mean;
  state.counters["moved"] = count_moved(home, planned);
}

// Arguments: exponent in tenths, spare slots per rank. The map is that of the previous call, whose routes differ by up to a
// fifth. If fetches cost nothing, the planner searches most.
void step(benchmark::State& state) {
  const auto loads = per_expert(routes_of(static_cast<double>(state.range(0)) / 10));
  const ExpertMap home = home_map(kExperts, kRanks, kExperts / kRanks + static_cast<int>(state.range(1)));
  auto before = loads;
  for (size_t e = 0; e < before.size(); ++e) before[e] = before[e] * static_cast<int64_t>(80 + e * 37 % 41) / 100;
  StepOptions options;
  options.seconds_per_move = 0;
  const StepPlan first = plan_step(before, home, 0, options);
  StepPlan plan;
  for (auto _ : state) benchmark::DoNotOptimize(plan = plan_step(loads, first.map, 0, options));
  const auto mean = static_cast<double>(plan.mean);
  state.counters["busiest"] = static_cast<double>(divide_routes(home, loads).max()) / mean;
  state.counters["before"] = static_cast<double>(plan.max_before) / mean;
  state.counters["with_replicas"] = static_cast<double>(plan.loads.max()) / mean;
  state.counters["fetched_first"] = static_cast<double>(first.fetched.size());
  state.counters["fetched"] = static_cast<double>(plan.fetched.size());
}

void divide(benchmark::State& state) {
  const auto routes = routes_of(static_cast<double>(state.range(0)) / 10);
  const ExpertMap map = plan_experts(per_expert(routes), home_map(kExperts, kRanks, kSlots));
  for (auto _ : state) benchmark::DoNotOptimize(divide_source(map, routes, kRanks - 1));
}

BENCHMARK(plan)->ArgsProduct({{5, 12, 20}, {0, 20}})->Unit(benchmark::kMillisecond);
BENCHMARK(step)->ArgsProduct({{5, 12, 20}, {1, 2, 8}})->Unit(benchmark::kMicrosecond);
BENCHMARK(divide)->Args({12})->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace switchyard

BENCHMARK_MAIN();

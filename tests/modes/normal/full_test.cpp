// SPDX-License-Identifier: Apache-2.0
// Release tier: the acceptance cases at the test sizes of the reference systems. Needs about 16 GB of memory.
//
// On GPUs: gpu_full, without the cases covered there by other programs (A09: BigOffsets; A12: GpuSoak in gpu_object_test).
#include <gtest/gtest.h>

#include <deque>

#include "modes/normal/scenario.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using switchyard::Dispatched;
using switchyard::NormalExchange;

constexpr bool kOnGpus = kBackend == switchyard::Backend::cuda;

Scenario base(const std::string& name, int world, int experts, int topk, int64_t tokens, Layout layout = Layout::rank_major) {
  Scenario s;
  s.name = name;
  s.problem.world = world;
  s.problem.experts = experts;
  s.problem.topk = topk;
  s.problem.layout = layout;
  s.tokens.assign(static_cast<size_t>(world), tokens);
  s.check_views = false;
  s.repeats = 1;
  s.num_sms = 16;
  return s;
}

Fleet fleet_of(int world, size_t heap) {
  Fleet fleet;
  fleet.world = world;
  fleet.options.heap_bytes = heap;
  fleet.options.backend = kBackend;
  fleet.options.timeout = std::chrono::minutes(kOnGpus ? 2 : 10);  // ranks compare gigabytes between calls
  return fleet;
}

/// W8 T4096 H7168 K8 E32: checks the layout, rows, ids, weights, counts, every handle field and the matrices, and the cached
/// dispatch and combine. Runs one exchange at a time.
TEST(Full, B01_B02_ReferenceShape) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    Scenario s = base("B01 full", 8, 32, 8, 4096);
    s.staging = staging;
    s.hidden = 7168;
    s.ring = {10, 6, 256};
    s.check_views = true;
    s.replace_weights = true;
    const auto c = make_case(s);
    auto config = make_config(*c);
    int64_t rows = 0;
    for (const auto& view : c->expected.ranks) rows = std::max(rows, view.rows);
    config.pool_bytes = staging == Staging::ring ? 0 : static_cast<size_t>(rows) * (7168 * 2 + 256) * 2 + (size_t{8} << 20);
    const Fleet fleet = fleet_of(8, NormalExchange::heap_bytes(config, 8, kBackend));
    EXPECT_EQ(joined(run_threads(fleet,
                                 [&](switchyard::Group& group, Failures& f) {
                                   NormalExchange exchange(group, config);
                                   run_on(group, exchange, *c, f);
                                 })),
              "");
  }
}

TEST(Full, B05_TokenEdgesUpTo4096) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
      Scenario s = base("B05 full", 8, 32, 8, 0, layout);
      s.staging = staging;
      s.tokens = {4096, 0, 1, 9, 257, 4096, 10, 11};
      s.ring = {10, 6, 256};
      s.repeats = 2;
      EXPECT_EQ(run_cases(Ranks::threads, {2, 1, false}, {make_case(s)}), "");
    }
  }
}

TEST(Full, B06_IncastOf4096TokensEach) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    Scenario s = base("B06 full", 8, 64, 8, 4096);
    s.staging = staging;
    s.routing = Routing::one_rank;
    s.hidden = 256;
    s.ring = {10, 6, 256};
    EXPECT_EQ(run_cases(Ranks::threads, {1, 2, false}, {make_case(s)}), "");
  }
}

#if !defined(SWITCHYARD_TEST_CUDA)
/// One rank receives more than 300 000 rows of 14 336 bytes, all of them written, compared and combined.
TEST(Full, A09_RowsBeyond32Bits) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    Scenario s = base("A09 full", 2, 16, 8, 18800, Layout::expert_major);
    s.staging = staging;
    s.routing = Routing::one_rank;
    s.hidden = 7168;
    s.identity = true;
    s.output_memory = OutputMemory::in_place;
    s.x_pattern = Pattern::random_values;
    s.order = CombineOrder::per_route;
    s.cached = false;
    const auto c = make_case(s);
    ASSERT_GT(c->expected.ranks[1].rows, 300000);
    auto config = make_config(*c);
    // Counts the rows received by rank 1 and the returned rows on each rank, one for each route.
    const size_t rows = static_cast<size_t>(c->expected.ranks[1].rows) + size_t{18800} * 8;
    config.pool_bytes = staging == Staging::ring ? 0 : rows * 7168 * 2 + (size_t{256} << 20);
    const Fleet fleet = fleet_of(2, NormalExchange::heap_bytes(config, 2));
    EXPECT_EQ(joined(run_threads(fleet,
                                 [&](switchyard::Group& group, Failures& f) {
                                   NormalExchange exchange(group, config);
                                   run_on(group, exchange, *c, f);
                                 })),
              "");
  }
}

/// 3000 calls on one object with random T and two live handles (dispatch, dispatch, combine, combine), across the epoch
/// wraparound.
class ManyCalls : public testing::TestWithParam<std::tuple<Ranks, Staging>> {};

TEST_P(ManyCalls, A12) {
  const auto [ranks, staging] = GetParam();
  std::vector<std::shared_ptr<const Case>> cases;
  for (uint64_t i = 0; i < 50; ++i) {
    Scenario s = base("A12 full routing " + std::to_string(i), 8, 24, 4, 0, Layout::expert_major);
    s.staging = staging;
    s.seed = i;
    s.problem.max_tokens = 32;
    for (size_t r = 0; r < s.tokens.size(); ++r) s.tokens[r] = static_cast<int64_t>(oracle::mix(5, i, r) % 33);
    s.drop_percent = i % 5 == 0 ? 25 : 0;
    s.hidden = 48;
    cases.push_back(make_case(s));
  }
  auto config = make_config(*cases[0]);
  config.pool_bytes *= 2;
  Fleet fleet = fleet_of(8, NormalExchange::heap_bytes(config, 8));
  fleet.options.num_warps = 2;
  const auto body = [&](switchyard::Group& group, Failures& f) {
    switchyard::detail::number_calls_from(group, (uint64_t{1} << 40) - 1500);
    NormalExchange exchange(group, config);
    std::deque<std::pair<std::unique_ptr<RankData>, Dispatched>> open;
    for (int call = 0; call < 1500; ++call) {
      const Case& c = *cases[oracle::mix(7, static_cast<uint64_t>(call)) % cases.size()];
      f.set_context(c.scenario.name + " call " + std::to_string(call));
      auto data = std::make_unique<RankData>(c, group.rank(), call);
      Dispatched d = exchange.dispatch(data->x(), data->ids(), data->weights());
      data->check_dispatched(d, f);
      open.emplace_back(std::move(data), std::move(d));
      while (call % 2 == 1 && !open.empty()) {
        auto& [oldest, rows] = open.front();
        const switchyard::RowBuffer y = exchange.allocate_rows(rows.handle, DType::bf16);
        oldest->fill_outputs(y.rows());
        exchange.combine(y.rows(), rows.handle, oldest->out(), oldest->combine_options());
        oldest->check_combined(f);
        open.pop_front();
      }
    }
  };
  EXPECT_EQ(joined(ranks == Ranks::threads ? run_threads(fleet, body) : run_processes(fleet, body, 0, 900000)), "");
}

INSTANTIATE_TEST_SUITE_P(Full, ManyCalls,
                         testing::Combine(testing::Values(Ranks::threads, Ranks::processes),
                                          testing::Values(Staging::direct, Staging::ring)),
                         [](const auto& p) {
                           return std::string(std::get<0>(p.param) == Ranks::threads ? "threads" : "processes") +
                                  (std::get<1>(p.param) == Staging::ring ? "_ring" : "_direct");
                         });
#endif

}  // namespace
}  // namespace harness

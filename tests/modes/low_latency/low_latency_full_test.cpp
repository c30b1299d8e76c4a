// SPDX-License-Identifier: Apache-2.0
// Release tier of low-latency mode: C1 with its specified shape (hidden 7168, top-8 of 256, 1 to 8 ranks) and the C3 grid,
// compared bit by bit.
//
// Executables: low_latency_full_test (label full) and gpu_low_latency_full (label gpu).
#include <gtest/gtest.h>

#include "harness/everywhere.hpp"
#include "modes/low_latency/low_latency_script.hpp"

namespace harness {
namespace {

constexpr Workers kOfEach{1, 1, false};

std::vector<int64_t> random_tokens(int world, int64_t max, uint64_t seed) {
  std::vector<int64_t> t;
  for (int r = 0; r < world; ++r)
    t.push_back(1 + static_cast<int64_t>(oracle::mix(seed, static_cast<uint64_t>(r)) % static_cast<uint64_t>(max)));
  return t;
}

struct At {
  int world;
  int64_t max;                ///< tokens
  bool default_grid = false;  ///< GPUs: the library's choice of multiprocessors instead of two
};
std::string name_of(const At& a) {
  return "W" + std::to_string(a.world) + "M" + std::to_string(a.max) + (a.default_grid ? "_default_grid" : "");
}
class ReferenceShape : public testing::TestWithParam<At> {};

/// At most M tokens, rows in [0, 1), softmax weights, five dispatches and their combines in both orders, ranks up to 0.3 ms
/// late; 20 repetitions for M = 8, and fewer where the oracle takes longer.
TEST_P(ReferenceShape, C01) {
  const auto [world, max, default_grid] = GetParam();
  LowLatencyScript s;
  s.name = "C1 " + name_of(GetParam());
  if (default_grid) s.num_sms = 0;
  s.world = world;
  s.config.hidden = 7168;
  s.config.num_experts = 256;
  s.config.topk = 8;
  s.config.max_tokens = max;
  s.seed = static_cast<uint64_t>(max);
  s.repeats = default_grid ? 1 : max > 64 ? 2 : max > 8 ? 4 : 20;
  s.max_delay_us = 300;
  for (uint64_t i = 0; i < 5; ++i) {
    LowLatencyStep& dispatch = s.dispatch(random_tokens(world, max, i));
    dispatch.x_pattern = Pattern::unit_interval;
    dispatch.softmax = true;
    s.combine(CombineOrder::per_route);
    s.combine(CombineOrder::per_rank);
  }
  EXPECT_EQ(run_scripts(Ranks::threads, kOfEach, {s}), "");
}

/// Every number of ranks with every M. On GPUs, where tests copy the rows of all experts to and from the device, only some of
/// these run; the largest M also runs with the grid chosen by the library.
std::vector<At> all_shapes() {
  if (kBackend == switchyard::Backend::cuda)
    return {{8, 8}, {8, 64},  {8, 128},       {1, 128},       {2, 8},        {2, 64},
            {4, 8}, {4, 128}, {1, 128, true}, {2, 128, true}, {4, 128, true}};
  std::vector<At> all;
  for (const int world : {1, 2, 4, 8})
    for (const int64_t max : {8, 64, 128}) all.push_back({world, max});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Full, ReferenceShape, testing::ValuesIn(all_shapes()), [](const auto& a) { return name_of(a.param); });

TEST(Full, C03_HiddenByExpertsByTopk) {
  for (const int64_t hidden : {128, 2048, 4096, 7168}) {
    for (const int experts : {4, 64, 256, 384}) {
      std::vector<LowLatencyScript> scripts;
      for (const int topk : {1, 2, 6, 8, 32}) {
        LowLatencyScript s;
        s.name = "C3 H " + std::to_string(hidden) + " E " + std::to_string(experts) + " K " + std::to_string(topk);
        s.world = 4;
        s.config.hidden = hidden;
        s.config.num_experts = experts;
        s.config.topk = topk;
        s.config.max_tokens = 9;
        s.config.sending = topk == 2 || topk == 8 ? Sending::per_rank : Sending::per_route;
        s.seed = oracle::mix(static_cast<uint64_t>(hidden + experts), static_cast<uint64_t>(topk));
        s.dispatch(random_tokens(4, 9, s.seed)).x_pattern = Pattern::random_values;
        s.combine(CombineOrder::per_route);
        s.combine(CombineOrder::per_rank).y_pattern = Pattern::wild_values;
        scripts.push_back(s);
      }
      EXPECT_EQ(run_scripts(Ranks::threads, kOfEach, scripts), "");
    }
  }
}

}  // namespace
}  // namespace harness

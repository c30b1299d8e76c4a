// SPDX-License-Identifier: Apache-2.0
// Release tier: the contest's tests and benchmark shapes (E1 to E14) at full size, and its benchmarks with many seeds (E20).
//
// Executables: flat_full_test (label full) and gpu_flat_full (label gpu).
#include <gtest/gtest.h>

#include "modes/flat/flat_shapes.hpp"

namespace harness {
namespace {

class ContestInFull : public testing::TestWithParam<ContestRun> {};

TEST_P(ContestInFull, IsExact) {
  const auto& [shape, world, num_sms] = GetParam();
  auto script = contest_script(shape, world, shape.hidden);
  script.num_sms = num_sms;
  EXPECT_EQ(run_scripts(Ranks::threads, {2, 1, false}, {script}), "");
}

/// On GPUs, the calls use all multiprocessors of a rank, as in user code.
INSTANTIATE_TEST_SUITE_P(E01toE14, ContestInFull, testing::ValuesIn(contest_runs(0)), contest_run_name);

/// The contest's leaderboard runs its benchmarks repeatedly, increasing the seed by 13 each time: the T of every rank, routing,
/// rows and weights all change. Rows have 48 columns; on 8 ranks, every 25th run uses full rows.
class ContestSeeds : public testing::TestWithParam<ContestShape> {};

TEST_P(ContestSeeds, E20_EveryThirteenth) {
  for (const int world : {4, 8}) {
    ContestShape shape = GetParam();
    std::vector<FlatScript> scripts;
    for (int i = 1; i <= 100; ++i) {
      shape.seed += 13;
      scripts.push_back(contest_script(shape, world, world == 8 && i % 25 == 0 ? shape.hidden : 48));
    }
    EXPECT_EQ(run_scripts(Ranks::threads, {2, 1, false}, scripts), "") << "W" << world;
  }
}

INSTANTIATE_TEST_SUITE_P(Benchmarks, ContestSeeds, testing::ValuesIn(kContestShapes + 9, std::end(kContestShapes)),
                         [](const auto& s) {
                           return "E" + std::to_string(s.param.experts) + "H" + std::to_string(s.param.hidden);
                         });

}  // namespace
}  // namespace harness

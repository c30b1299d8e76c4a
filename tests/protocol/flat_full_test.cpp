// SPDX-License-Identifier: Apache-2.0
// Release tier: the contest's tests and benchmark shapes (E1 to E14) in full.
//
// Executables: flat_full_test (label full), gpu_flat_full (label gpu).
#include <gtest/gtest.h>

#include "protocol/flat_shapes.hpp"

namespace harness {
namespace {

class ContestInFull : public testing::TestWithParam<ContestRun> {};

TEST_P(ContestInFull, IsExact) {
  const auto& [shape, world] = GetParam();
  EXPECT_EQ(run_scripts(Ranks::threads, {2, 1, false}, {contest_script(shape, world, shape.hidden)}), "");
}

INSTANTIATE_TEST_SUITE_P(E01toE14, ContestInFull, testing::ValuesIn(contest_runs()), contest_run_name);

}  // namespace
}  // namespace harness

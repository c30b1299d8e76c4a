// SPDX-License-Identifier: Apache-2.0
// Release tier: the contest's tests and benchmark shapes (E1 to E14) in full, 8 ranks.
//
// Executable: flat_full_test. Source: flat_full_test.cpp, with the harness library. Label: full (EXCEPT thread address).
// Timeout: 900 s.
#include <gtest/gtest.h>

#include "protocol/flat_shapes.hpp"

namespace harness {
namespace {

class ContestInFull : public testing::TestWithParam<ContestShape> {};

TEST_P(ContestInFull, IsExact) {
  EXPECT_EQ(run_scripts(Ranks::threads, {2, 1, false}, {contest_script(GetParam(), 8, GetParam().hidden)}), "");
}

INSTANTIATE_TEST_SUITE_P(E01toE14, ContestInFull, testing::ValuesIn(kContestShapes));

}  // namespace
}  // namespace harness

// SPDX-License-Identifier: Apache-2.0
// main() of the suites on the CPU, standalone or as a member of a team started by mpirun.
#include <gtest/gtest.h>

#include "harness/rank_team.hpp"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return harness::is_member_of_launcher() ? harness::run_tests_as_member() : RUN_ALL_TESTS();
}

// SPDX-License-Identifier: Apache-2.0
// Tests the framework that runs tests in teams of processes (rank_team.hpp), with ranks on the CPU. A second program, which
// must fail, runs the failing tests that are disabled here and thus shows that the framework detects failures.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "harness/fleet.hpp"
#include "harness/rank_team.hpp"

namespace harness {
namespace {

Fleet fleet_of(int world) {
  Fleet fleet;
  fleet.world = world;
  fleet.options.heap_bytes = size_t{1} << 20;
  return fleet;
}

class Team : public testing::TestWithParam<int> {
 protected:
  /// Runs all ranks in the team's processes. Each rank reports its identity.
  static std::vector<std::string> names(int world) {
    return run_processes(fleet_of(world), [](switchyard::Group& group, Failures& failures) {
      failures.add(std::to_string(group.rank()) + " of " + std::to_string(group.size()));
    });
  }
  static std::vector<std::string> expected(int world) {
    std::vector<std::string> all;
    for (int r = 0; r < world; ++r) {
      const std::string rank = std::to_string(r);
      all.push_back("rank " + rank + " : " + rank + " of " + std::to_string(world));
    }
    return all;
  }
};

TEST_P(Team, EveryMemberHearsAllRanks) {
  ASSERT_NE(RankTeam::mine(), nullptr);
  EXPECT_EQ(RankTeam::mine()->world(), GetParam());
  EXPECT_EQ(names(GetParam()), expected(GetParam()));
}

TEST_P(Team, RanksStayInTheirProcesses) {
  static int groups;
  groups = 0;  // of earlier repetitions
  for (int n = 1; n <= 5; ++n) {
    const auto seen = run_processes(fleet_of(GetParam()), [](switchyard::Group& group, Failures& failures) {
      ++groups;
      group.barrier();
      failures.equal(RankTeam::mine()->rank(), group.rank(), "rank");
    });
    EXPECT_EQ(joined(seen), "");
    EXPECT_EQ(groups, n);
  }
}

TEST_P(Team, SmallerGroupsLeaveMembersOut) {
  for (int world = 1; world <= GetParam(); ++world) EXPECT_EQ(names(world), expected(world));
  EXPECT_NE(joined(names(GetParam() + 1)), "");
}

TEST_P(Team, ErrorsOfARankReachAll) {
  const auto seen = run_processes(fleet_of(GetParam()), [](switchyard::Group& group, Failures&) {
    if (group.rank() == group.size() - 1) throw std::runtime_error("the last rank's error");
  });
  EXPECT_NE(joined(seen).find("the last rank's error"), std::string::npos);
  EXPECT_EQ(names(GetParam()), expected(GetParam())) << "the group after it";
}

INSTANTIATE_TEST_SUITE_P(InStep, Team, testing::Values(1, 2, 5),
                         [](const auto& test) { return "W" + std::to_string(test.param) + "_"; });

/// Tests that must fail, in teams of two.
class Planted : public Team {};
TEST_P(Planted, DISABLED_MemberDies) {
  (void)names(2);
  if (RankTeam::mine()->rank() == 1) ::_exit(0);
  (void)names(2);
}
TEST_P(Planted, DISABLED_MemberLeavesOutAGroup) {
  if (RankTeam::mine()->rank() == 0) (void)names(2);
}
TEST_P(Planted, DISABLED_MemberIsAtAnotherTest) {
  if (RankTeam::mine()->rank() == 1) return;
  EXPECT_EQ(joined(RankTeam::mine()->gather({})), "");
}
TEST_P(Planted, DISABLED_MemberIsAtAnotherTestNext) {
  if (RankTeam::mine()->rank() == 1) (void)RankTeam::mine()->gather({});
}
TEST_P(Planted, DISABLED_OnlyTheOtherRankFails) { EXPECT_EQ(RankTeam::mine()->rank(), 0) << "seen by rank 1 alone"; }
TEST_P(Planted, DISABLED_NothingIsWrong) { EXPECT_EQ(names(2), expected(2)); }
INSTANTIATE_TEST_SUITE_P(InStep, Planted, testing::Values(2), [](const auto&) { return "W2_"; });

struct Ended {
  int code;
  std::string text;
};
/// Runs this program again with the planted tests selected by `filter`.
Ended run_planted(const std::string& filter) {
  const std::string command = "SWITCHYARD_TEST_DEADLINE_S=1 /proc/" + std::to_string(::getpid()) +
                              "/exe --gtest_also_run_disabled_tests --gtest_filter='*Planted.DISABLED_" + filter + "/*' 2>&1";
  FILE* const out = ::popen(command.c_str(), "r");
  Ended ended{-1, ""};
  for (int c; out && (c = std::fgetc(out)) != EOF;) ended.text += static_cast<char>(c);
  if (out) ended.code = ::pclose(out);
  return ended;
}

TEST(PlantedMistakes, AreNoticed) {
  const auto good = run_planted("NothingIsWrong");
  EXPECT_EQ(good.code, 0) << good.text;
  EXPECT_NE(good.text.find("[  PASSED  ] 1 test"), std::string::npos) << good.text;
  const std::pair<const char*, const char*> mistakes[] = {{"MemberDies", "fell out of step"},
                                                          {"MemberLeavesOutAGroup", "fell out of step"},
                                                          {"MemberIsAtAnotherTest*", "rank 1 is at"},
                                                          {"OnlyTheOtherRankFails", "seen by rank 1 alone"}};
  std::vector<std::future<Ended>> runs;  // concurrently, because they mostly wait
  for (const auto& [mistake, says] : mistakes) runs.push_back(std::async(std::launch::async, run_planted, mistake));
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto& [mistake, says] = mistakes[i];
    const auto ended = runs[i].get();
    EXPECT_NE(ended.code, 0) << mistake << "\n" << ended.text;
    EXPECT_NE(ended.text.find(says), std::string::npos) << mistake << "\n" << ended.text;
  }
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return harness::run_tests_in_teams();
}

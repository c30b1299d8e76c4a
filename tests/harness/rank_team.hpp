// SPDX-License-Identifier: Apache-2.0
// A process per rank for many tests in turn: W processes run the same tests in step, each as one rank of every group. A process
// that uses a GPU takes a second or two to start, longer beside others, and a suite has hundreds of groups.
//
//   int main(int argc, char** argv) {
//     testing::InitGoogleTest(&argc, argv);
//     return harness::run_tests_in_teams();   // run_processes (fleet.hpp) finds its team by itself
//   }
//
// Members must do the same: tests may not depend on time, on the process or on what a body did in another process.
#pragma once

#include <string>
#include <vector>

namespace switchyard::test {
class ChildRank;
}

namespace harness {

class RankTeam {
 public:
  /// For run_tests_in_teams: `link` to the process that lets rounds begin, `folder` for sockets and lines.
  RankTeam(const switchyard::test::ChildRank& link, std::string folder);
  /// The team this process is a member of, or null.
  static RankTeam* mine();

  int rank() const;
  int world() const;
  /// Where the group of this round meets.
  std::string store() const;
  std::string token() const { return "round-" + std::to_string(round_); }
  /// Ends a round: waits for all members and returns all their lines in rank order, the same to each of them. A member that is
  /// at another test is one more line.
  std::vector<std::string> gather(const std::vector<std::string>& lines);

 private:
  std::string file(int rank) const;

  const switchyard::test::ChildRank& link_;
  const std::string folder_;
  int round_ = 1;
};

/// Instead of RUN_ALL_TESTS, before this process has threads: tests whose name says W<n>_ run in n processes, one world after
/// the other, all other tests in this process. Filters and shards apply. Only rank 0 of a team prints, unless only another one
/// failed. Returns 0 if all tests passed on all ranks. A member that dies, or is silent for five minutes
/// (SWITCHYARD_TEST_DEADLINE_S: ten times that), ends its team and fails the program.
int run_tests_in_teams();

}  // namespace harness

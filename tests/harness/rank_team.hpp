// SPDX-License-Identifier: Apache-2.0
// Reuses one process per rank for many tests: W processes run the same tests in step, each as the same rank of every group. A
// process that uses a GPU takes a second or two to start (longer when several start at once), and a suite has hundreds of
// groups.
//
//   int main(int argc, char** argv) {
//     testing::InitGoogleTest(&argc, argv);
//     return harness::run_tests_in_teams();  // run_processes (fleet.hpp) finds its team without further setup
//   }
//
// Members must run identically: tests may not depend on time, on the process, or on side effects of a body in another process.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace harness {

class RankTeam {
 public:
  /// `folder` holds sockets and result files. `meet` is called with the number of a round after this member has written its
  /// file for that round; it returns when all members have written theirs.
  RankTeam(int rank, int world, std::string folder, std::function<void(int round)> meet);
  /// The team of this process, or null.
  static RankTeam* mine();

  int rank() const { return rank_; }
  int world() const { return world_; }
  /// Rendezvous address of this round's group.
  std::string store() const;
  std::string token() const { return "round-" + std::to_string(round_); }
  /// Ends a round: waits for all members and returns all their lines in rank order, identical on every member. One more line is
  /// added for each member that runs a different test.
  std::vector<std::string> gather(const std::vector<std::string>& lines);

  /// File with the lines of `rank` for this round.
  std::string file(int rank) const;

 private:
  const int rank_, world_;
  const std::string folder_;
  const std::function<void(int)> meet_;
  int round_ = 1;
};

/// Replaces RUN_ALL_TESTS; call it before this process creates any threads. Tests whose names contain W<n>_ run in n processes,
/// one world after the other; all other tests run in this process. Filters and shards apply. Only rank 0 of a team prints,
/// unless only another rank failed. Returns 0 if all tests passed on all ranks. A member that dies, or is silent for five
/// minutes (with SWITCHYARD_TEST_DEADLINE_S: ten times that value), ends its team and makes the program fail.
int run_tests_in_teams();

/// Whether mpirun started this process as a member of a team: SWITCHYARD_TEST_TEAM names its folder
/// (tests/multiproc/mpirun.sh).
bool is_member_of_launcher();
/// Replaces RUN_ALL_TESTS in a member of a launcher's team: runs the tests whose names contain AnyWorld or the number of
/// processes started by mpirun. Returns 1 if there are no such tests.
int run_tests_as_member();

}  // namespace harness

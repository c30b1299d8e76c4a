// SPDX-License-Identifier: Apache-2.0
#include "harness/rank_team.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <stdexcept>

#include "harness/fleet.hpp"
#include "multiproc/fork_ranks.hpp"

namespace harness {

namespace fs = std::filesystem;
using switchyard::test::ChildRank;
using switchyard::test::ForkedRanks;
using switchyard::test::Milliseconds;
using switchyard::test::RankEnd;

namespace {

RankTeam* g_mine = nullptr;

std::string current_test() {
  const testing::TestInfo* const info = testing::UnitTest::GetInstance()->current_test_info();
  return info ? std::string(info->test_suite_name()) + "." + info->name() : "no test";
}

/// Returns the tests selected by GoogleTest's flags, grouped by the world in their names (0 for names without one).
std::map<int, std::vector<std::string>> selected_tests() {
  const auto listing = switchyard::test::run_ranks(1, [&](ChildRank& me) {
    const fs::path file = fs::temp_directory_path() / ("switchyard-tests-" + std::to_string(::getpid()));
    ChildRank::require(std::freopen(file.c_str(), "w", stdout) != nullptr, "a file for the list of tests");
    GTEST_FLAG_SET(list_tests, true);
    ChildRank::require(RUN_ALL_TESTS() == 0, "a list of the tests");
    std::fflush(stdout);
    std::ifstream list(file);
    fs::remove(file);
    std::string suite;
    for (std::string line; std::getline(list, line);) {
      line = line.substr(0, line.find("  # "));
      if (line.starts_with("  ")) me.say(suite + line.substr(2));
      if (line.ends_with(".") && !line.starts_with(" ")) suite = line;
    }
  });
  if (!listing[0].ok()) throw std::runtime_error("could not list the tests: " + listing[0].error);
  std::map<int, std::vector<std::string>> by_world;
  for (const std::string& name : listing[0].said) {
    if (name.find("DISABLED_") != std::string::npos && !GTEST_FLAG_GET(also_run_disabled_tests)) continue;
    const size_t at = name.find("/W");
    const long world = at == std::string::npos ? 0 : std::strtol(name.c_str() + at + 2, nullptr, 10);
    by_world[static_cast<int>(world)].push_back(name);
  }
  return by_world;
}

void select(const std::vector<std::string>& names) {
  std::string filter;
  for (const std::string& name : names) filter += (filter.empty() ? "" : ":") + name;
  GTEST_FLAG_SET(filter, filter);
  GTEST_FLAG_SET(shuffle, false);  // shuffling uses the clock, which differs between processes
}

/// Starts rounds until all members have ended. Returns false if a member was missing.
bool serve(ForkedRanks& members, Milliseconds patience) {
  for (int round = 1;; ++round) {
    int there = 0, ended = 0;
    for (int r = 0; r < members.world(); ++r) {
      if (members.wait_until_said(r, "round " + std::to_string(round), patience)) {
        ++there;
      } else if (members.wait_until_ended(r, Milliseconds{0})) {
        ++ended;
      }
    }
    if (ended == members.world()) return true;
    if (there < members.world()) return false;
    members.send_to_all("go " + std::to_string(round));
  }
}

/// Runs `names` in `world` processes. Returns true if all tests passed on all ranks.
bool run_team(int world, const std::vector<std::string>& names) {
  const Milliseconds limit = 10 * patience(std::chrono::seconds(30));
  std::string folder = store_prefix() + "XXXXXX";
  if (!::mkdtemp(folder.data())) throw std::runtime_error("no folder for a team of ranks");
  const auto output = [&](int rank) { return folder + "/output." + std::to_string(rank); };
  ForkedRanks members(world, [&](ChildRank& me) {
    RankTeam team(me.rank(), me.world(), folder, [&me](int round) {
      me.say("round " + std::to_string(round));
      me.await("go " + std::to_string(round));
    });
    g_mine = &team;
    if (me.rank() > 0)
      ChildRank::require(std::freopen(output(me.rank()).c_str(), "w", stdout) != nullptr, "a file for the output");
    select(names);
    if (RUN_ALL_TESTS() != 0) throw std::runtime_error("tests failed");
  });
  const bool in_step = serve(members, limit);
  if (!in_step) std::cerr << "a team of " << world << " ranks fell out of step: a member ended early or was silent\n";
  const auto ends = members.finish(in_step ? limit : Milliseconds{0});
  bool passed = in_step;
  for (const RankEnd& end : ends) {
    if (end.ok()) continue;
    passed = false;
    std::cerr << "team of " << world << ", " << end << "\n";
    const bool shown = ends[0].exit_code == 1;  // rank 0 has already printed the failure
    if (!shown && !end.overdue && end.rank > 0) std::cerr << std::ifstream(output(end.rank)).rdbuf();
  }
  fs::remove_all(folder);
  return passed;
}

}  // namespace

RankTeam::RankTeam(int rank, int world, std::string folder, std::function<void(int)> meet)
    : rank_(rank), world_(world), folder_(std::move(folder)), meet_(std::move(meet)) {}
RankTeam* RankTeam::mine() { return g_mine; }
std::string RankTeam::store() const { return "unix:" + folder_ + "/store" + std::to_string(round_); }
std::string RankTeam::file(int rank) const { return folder_ + "/" + std::to_string(round_) + "." + std::to_string(rank); }

std::vector<std::string> RankTeam::gather(const std::vector<std::string>& lines) {
  {
    std::ofstream out(file(rank()) + ".new");
    out << current_test() << "\n";
    for (const std::string& line : lines) out << line << "\n";
  }
  fs::rename(file(rank()) + ".new", file(rank()));  // renamed, so other ranks read only complete files
  meet_(round_);
  std::vector<std::string> all;
  std::string first;
  for (int r = 0; r < world(); ++r) {
    std::ifstream in(file(r));
    std::string test;
    std::getline(in, test);
    if (r == 0) first = test;
    if (test != first) all.push_back("rank " + std::to_string(r) + " is at " + test + ", rank 0 at " + first);
    for (std::string line; std::getline(in, line);) all.push_back(line);
  }
  ++round_;
  return all;
}

int run_tests_in_teams() {
  const auto by_world = selected_tests();
  bool passed = true;
  for (const auto& [world, names] : by_world) {
    if (world > 0) passed = run_team(world, names) && passed;
  }
  if (by_world.contains(0) || by_world.empty()) {
    select(by_world.empty() ? std::vector<std::string>{"-*"} : by_world.at(0));
    passed = RUN_ALL_TESTS() == 0 && passed;
  }
  return passed ? 0 : 1;
}

bool is_member_of_launcher() { return std::getenv("SWITCHYARD_TEST_TEAM") != nullptr; }

int run_tests_as_member() {
  const auto number = [](const char* name) {
    const char* const text = std::getenv(name);
    return text ? std::atoi(text) : -1;
  };
  const int rank = number("OMPI_COMM_WORLD_RANK"), world = number("OMPI_COMM_WORLD_SIZE");
  if (rank < 0 || world < 1) {
    std::cerr << "SWITCHYARD_TEST_TEAM is set, but mpirun has not started this process\n";
    return 1;
  }
  const Milliseconds limit = 10 * patience(std::chrono::seconds(30));
  RankTeam team(rank, world, std::getenv("SWITCHYARD_TEST_TEAM"), [&](int) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    for (int r = 0; r < world; ++r)
      while (!fs::exists(g_mine->file(r))) {
        if (std::chrono::steady_clock::now() > deadline)
          throw std::runtime_error("rank " + std::to_string(r) + " did not come to " + current_test());
        ::usleep(1000);
      }
  });
  std::vector<std::string> names;
  for (const auto& [of_world, of_tests] : selected_tests())
    for (const std::string& name : of_tests)
      if (of_world == world || name.find("AnyWorld") != std::string::npos) names.push_back(name);
  if (names.empty()) {
    std::cerr << "no test has " << world << " ranks\n";
    return 1;
  }
  const std::string output = team.file(rank) + ".output";
  if (rank > 0 && std::freopen(output.c_str(), "w", stdout) == nullptr) return 1;
  select(names);
  g_mine = &team;
  const int failed = RUN_ALL_TESTS();
  std::fflush(stdout);
  if (failed != 0 && rank > 0) std::cerr << std::ifstream(output).rdbuf();
  return failed;
}

}  // namespace harness

// SPDX-License-Identifier: Apache-2.0
// Ranks started by the command line tool, as threads and as processes: their results, and how they end.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <csignal>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "tools/run/ranks.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

RankJob two_ranks(bool processes) {
  RankJob job;
  job.world = 2;
  job.processes = processes;
  job.group.heap_bytes = size_t{1} << 20;
  job.group.timeout = std::chrono::milliseconds(5000);
  return job;
}

TEST(Ranks, ResultsComeBackInRankOrder) {
  for (const bool processes : {false, true}) {
    std::vector<int64_t> progress(2);
    const auto results = run_ranks(
        two_ranks(processes),
        [](Group& group, RankLink& link) -> json {
          link.progress(group.rank() + 10, "note");
          int mine = group.rank() + 1, all[2] = {};
          group.all_gather(&mine, sizeof mine, all);
          return {{"rank", group.rank()}, {"sum", all[0] + all[1]}};
        },
        [&](int rank, int64_t done, const std::string&) { progress[static_cast<size_t>(rank)] = done; });
    for (int r = 0; r < 2; ++r) {
      EXPECT_EQ(results[static_cast<size_t>(r)].at("rank"), r);
      EXPECT_EQ(results[static_cast<size_t>(r)].at("sum"), 3);
      EXPECT_EQ(progress[static_cast<size_t>(r)], r + 10);
    }
  }
}

TEST(Ranks, TheRankThatFailedIsNamedNotTheOneThatNoticed) {
  for (const bool processes : {false, true}) {
    try {
      run_ranks(two_ranks(processes), [](Group& group, RankLink&) -> json {
        if (group.rank() == 1) throw std::runtime_error("this rank is tired");
        group.barrier();
        return {};
      });
      FAIL() << "no error";
    } catch (const RankError& e) {
      EXPECT_EQ(e.rank(), 1);
      EXPECT_NE(std::string(e.what()).find("this rank is tired"), std::string::npos) << e.what();
    }
  }
}

TEST(Ranks, AKilledProcessIsNamedWithItsSignal) {
  try {
    run_ranks(two_ranks(true), [](Group& group, RankLink&) -> json {
      if (group.rank() == 0) raise(SIGKILL);
      group.barrier();
      return {};
    });
    FAIL() << "no error";
  } catch (const RankError& e) {
    EXPECT_EQ(e.rank(), 0);
    EXPECT_NE(std::string(e.what()).find("signal 9"), std::string::npos) << e.what();
  }
}

/// How the ranks of `job` fail.
struct Failure {
  ErrorCode code = ErrorCode::ok;
  std::string text;
  bool while_working = false;
  bool blames_exchange = false;
};
Failure failure_of(const RankJob& job, const RankBody& body) {
  try {
    run_ranks(job, body);
  } catch (const RankError& e) {
    return {e.code(), e.what(), true, e.blames_exchange()};
  } catch (const Error& e) {
    return {e.code(), e.what(), false, false};
  }
  return {};
}

TEST(Ranks, AGroupThatCannotBeFormedIsTheSameErrorForThreadsAndProcesses) {
  const RankBody never = [](Group&, RankLink&) -> json { throw std::runtime_error("there is a group"); };
  for (const bool processes : {false, true}) {
    RankJob job = two_ranks(processes);
    job.group.num_blocks = 0;
    Failure f = failure_of(job, never);
    EXPECT_EQ(f.code, ErrorCode::invalid_argument);
    EXPECT_EQ(f.text, "GroupOptions::num_blocks = 0: must be in [1, 1024]");
    EXPECT_FALSE(f.while_working);

    job = two_ranks(processes);
    job.group.heap_bytes = size_t{1} << 44;  // rejected before any memory is allocated
    job.size_flags = "-M or -K";
    f = failure_of(job, never);
    EXPECT_EQ(f.code, ErrorCode::system);
    EXPECT_EQ(f.text.rfind("the symmetric heap needs 32768 GiB", 0), 0u) << f.text;
    EXPECT_NE(f.text.find("make -M or -K smaller"), std::string::npos) << f.text;
    EXPECT_EQ(f.text.find("heap_bytes"), std::string::npos) << f.text;
    EXPECT_FALSE(f.while_working);

    setenv("SWITCHYARD_TUNING", "/nonexistent/f", 1);
    f = failure_of(two_ranks(processes), never);
    unsetenv("SWITCHYARD_TUNING");
    EXPECT_EQ(f.code, ErrorCode::invalid_argument);
    EXPECT_EQ(f.text.rfind("SWITCHYARD_TUNING: /nonexistent/f: cannot be read", 0), 0u) << f.text;
  }
}

TEST(Ranks, ErrorsKeepTheirCodes) {
  const auto of = [](bool processes, const std::function<void()>& fail) {
    return failure_of(two_ranks(processes), [&](Group& group, RankLink&) -> json {
      if (group.rank() == 1) fail();
      group.barrier();
      return {};
    });
  };
  for (const bool processes : {false, true}) {
    Failure f = of(processes, [] { throw Error(ErrorCode::unsupported, "not on this machine"); });
    EXPECT_EQ(f.code, ErrorCode::unsupported);
    EXPECT_EQ(f.text, "rank 1: not on this machine");
    EXPECT_FALSE(f.blames_exchange);
    f = of(processes, [] { throw std::bad_alloc(); });
    EXPECT_EQ(f.code, ErrorCode::system);
    EXPECT_EQ(f.text, "rank 1: no memory is left");
    EXPECT_FALSE(f.blames_exchange);
    f = of(processes, [] { throw Error(ErrorCode::mismatch, "two calls"); });
    EXPECT_EQ(f.code, ErrorCode::mismatch);
    EXPECT_TRUE(f.blames_exchange);
    f = of(processes, [] { throw std::runtime_error("tired"); });
    EXPECT_EQ(f.code, ErrorCode::peer_failed);
    EXPECT_TRUE(f.blames_exchange);
    EXPECT_TRUE(f.while_working);
  }
}

/// Processes do not need a folder to meet, so they leave none behind.
TEST(Ranks, ProcessesMeetWithoutFiles) {
  setenv("TMPDIR", "/nonexistent", 1);
  const auto results = run_ranks(two_ranks(true), [](Group& group, RankLink&) -> json { return group.rank(); });
  unsetenv("TMPDIR");
  EXPECT_EQ(results, (std::vector<json>{0, 1}));
}

}  // namespace
}  // namespace switchyard::tool

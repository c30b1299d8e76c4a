// SPDX-License-Identifier: Apache-2.0
// Rendezvous of threads and processes: admitted ranks, missing ranks, and the reports to the other ranks when a rank dies.
#include "bootstrap/bootstrap.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <thread>

#include "arch/ops.hpp"
#include "bootstrap/rank_list.hpp"
#include "launch/on_threads.hpp"
#include "multiproc/fork_ranks.hpp"
#include "multiproc/meeting.hpp"
#include "switchyard/status.hpp"

namespace switchyard {
namespace {

using namespace std::chrono_literals;
using namespace detail;
using namespace test;

template <class Body>
void run_threads(std::vector<std::unique_ptr<Bootstrap>>& links, const Body& body) {
  launch::on_threads(links.size(), [&](size_t r) { body(*links[r]); });
}

// ---- error texts ----

TEST(Errors, TimeoutTellsTheWholeStoryInFlagWordsOfTheArchLayer) {
  WaitReport report{"dispatch", "rows", 17, 2, 5, flag_word(17, 3), flag_word(16, 9), 30000.4, ""};
  const std::string text = PeerTimeout(report).what();
  for (const char* part :
       {"dispatch", "call 17", "rank 2", "30000 ms", "'rows'", "rank 5", "epoch 17 with value 3", "epoch 16 with value 9"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
  report.seen = 0;
  EXPECT_NE(std::string(PeerTimeout(report).what()).find("never raised"), std::string::npos);
  report.advice = "Or it is asleep";
  EXPECT_NE(std::string(PeerTimeout(report).what()).find("any more. Or it is asleep"), std::string::npos);
}

TEST(Errors, FailureNamesRankReasonAndContext) {
  const PeerFailed error(3, ErrorCode::heap_exhausted, "combine on rank 1");
  EXPECT_EQ(error.rank(), 3);
  EXPECT_EQ(error.reason(), ErrorCode::heap_exhausted);
  EXPECT_EQ(error.code(), ErrorCode::peer_failed);
  const std::string text = error.what();
  for (const char* part : {"combine on rank 1", "rank 3", "heap_exhausted"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Errors, RanksAreListedInShort) {
  EXPECT_EQ(describe_ranks({4}), "rank 4");
  EXPECT_EQ(describe_ranks({1, 2}), "ranks 1, 2");
  EXPECT_EQ(describe_ranks({0, 1, 2, 5, 7, 8, 9, 10}), "ranks 0-2, 5, 7-10");
}

// ---- threads ----

class ThreadRanks : public testing::TestWithParam<int> {};

TEST_P(ThreadRanks, GatherOddSizes) {
  auto links = make_thread_bootstraps(GetParam());
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{13}, size_t{100000}}) {
    run_threads(links, [&](Bootstrap& link) { exchange_rounds(link, bytes); });
  }
}

TEST_P(ThreadRanks, ObjectsAreShared) {
  auto links = make_thread_bootstraps(GetParam());
  std::atomic<int> wrong{0};
  run_threads(links, [&](Bootstrap& link) {
    const auto all = link.exchange_objects(std::make_shared<int>(link.rank() * 3), kLong);
    for (int r = 0; r < link.world(); ++r) wrong += *std::static_pointer_cast<int>(all[static_cast<size_t>(r)]) != r * 3;
    EXPECT_TRUE(link.same_process());
    EXPECT_THROW(link.exchange_fds(0, kShort), Error);
  });
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(Worlds, ThreadRanks, testing::Values(1, 2, 3, 8));

TEST(Threads, MissingRanksAreListed) {
  auto links = make_thread_bootstraps(4);
  const std::unique_ptr<Bootstrap> present = std::move(links[1]);
  try {
    present->barrier(kShort);
    FAIL() << "nobody came, and nobody was missed";
  } catch (const RendezvousError& error) {
    EXPECT_EQ(error.missing_ranks(), (std::vector<int>{0, 2, 3}));
    EXPECT_NE(std::string(error.what()).find("ranks 0, 2, 3 of 4"), std::string::npos) << error.what();
  }
}

TEST(Threads, LeavingEndsTheWaitOfTheOthers) {
  auto links = make_thread_bootstraps(3);
  std::thread waits([&] {
    try {
      links[0]->barrier(kLong);
      ADD_FAILURE() << "the barrier passed without rank 2";
    } catch (const PeerFailed& error) {
      EXPECT_EQ(error.rank(), 2);
    }
  });
  links[2]->leave();
  links[2]->leave();
  links[2].reset();
  waits.join();
}

TEST(Threads, RanksMayLeaveAtDifferentTimes) {
  auto links = make_thread_bootstraps(3);
  run_threads(links, [](Bootstrap& link) {
    link.barrier(kLong);
    link.leave();  // the others may still be copying the round's data
  });
}

TEST(Threads, DifferentSizesAreAMismatch) {
  auto links = make_thread_bootstraps(2);
  std::atomic<int> mismatches{0};
  run_threads(links, [&](Bootstrap& link) {
    char mine[8] = {}, all[16];
    try {
      link.all_gather(mine, link.rank() == 0 ? 4 : 8, all, kLong);
    } catch (const Error& error) {
      mismatches += error.code() == ErrorCode::mismatch;
    }
  });
  EXPECT_EQ(mismatches, 2);
}

TEST(Threads, WorldIsChecked) {
  EXPECT_THROW(make_thread_bootstraps(0), Error);
  EXPECT_THROW(make_thread_bootstraps(65), Error);
}

// ---- processes ----

using ProcessCase = std::tuple<int, std::string>;
class ProcessRanks : public testing::TestWithParam<ProcessCase> {};

TEST_P(ProcessRanks, MeetExchangeAndLeave) {
  const auto& [world, kind] = GetParam();
  const Place place(kind);
  const auto ends = run_ranks(world, [&](ChildRank& me) {
    // The ranks meet twice in a row at the same address: a rank may return before rank 0 listens again.
    for (int group = 0; group < 2; ++group) {
      const auto link = connect_processes({me.rank(), me.world(), place.store(), "token"}, kLong);
      me.require(link->rank() == me.rank() && link->world() == me.world() && !link->same_process(), "identity");
      for (const size_t bytes : {size_t{0}, size_t{1}, size_t{300000}}) exchange_rounds(*link, bytes);
      link->leave();
      link->leave();
    }
  });
  expect_ok(ends);
  if (kind == "path") {
    struct stat info;
    EXPECT_NE(::stat(place.path().c_str(), &info), 0) << "the socket file is still there";
  }
}

TEST_P(ProcessRanks, DescriptorsArePassed) {
  const auto& [world, kind] = GetParam();
  const Place place(kind);
  expect_ok(run_ranks(world, [&](ChildRank& me) {
    const auto link = connect_processes({me.rank(), me.world(), place.store(), "token"}, kLong);
    int ends[2];
    me.require(::pipe2(ends, O_CLOEXEC) == 0, "pipe");
    const UniqueFd reader(ends[0]), writer(ends[1]);
    const auto all = link->exchange_fds(writer.get(), kLong);
    for (const UniqueFd& fd : all) {
      me.require((::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) != 0, "descriptors close on exec");
      const char mine = static_cast<char>(me.rank());
      me.require(::write(fd.get(), &mine, 1) == 1, "write to a peer's pipe");
    }
    uint64_t seen = 0;
    for (int r = 0; r < me.world(); ++r) {
      char from = 0;
      me.require(::read(reader.get(), &from, 1) == 1, "read");
      seen |= uint64_t{1} << from;
    }
    me.require(seen == (uint64_t{1} << me.world()) - 1, "one byte of every rank");
    link->barrier(kLong);
  }));
}

INSTANTIATE_TEST_SUITE_P(Worlds, ProcessRanks,
                         testing::Combine(testing::Values(1, 2, 3, 8),
                                          testing::Values("path", "abstract", "127.0.0.1", "localhost")));

TEST(Processes, EveryRankListsTheMissingOnes) {
  const auto ends = with_enough_time(
      [](Milliseconds deadline) {
        const Place place("path");
        return run_ranks(5, [&](ChildRank& me) {
          if (me.rank() == 2 || me.rank() == 4) return;
          say_outcome(me, {me.rank(), me.world(), place.store(), "token"}, me.rank() == 0 ? deadline : 2 * deadline);
        });
      },
      [](const std::vector<RankEnd>& all) { return said(all[0], "missing 1 ") || said(all[0], "missing 2 3 "); });
  for (const int r : {0, 1, 3}) {
    EXPECT_TRUE(said(ends[static_cast<size_t>(r)], "missing 2 4 ")) << r << ": " << all_said(ends[static_cast<size_t>(r)]);
    EXPECT_TRUE(said(ends[static_cast<size_t>(r)], "ranks 2, 4 of 5 did not come")) << all_said(ends[static_cast<size_t>(r)]);
  }
}

TEST(Processes, WhoeverGivesUpFirstAllListTheSameMissingRank) {
  const auto ends = with_enough_time(
      [](Milliseconds deadline) {
        const Place place("127.0.0.1");
        return run_ranks(4, [&](ChildRank& me) {
          if (me.rank() == 3) return;
          const Milliseconds deadlines[] = {2 * deadline, deadline, 3 * deadline};
          say_outcome(me, {me.rank(), me.world(), place.store(), "token"}, deadlines[me.rank()]);
        });
      },
      [](const std::vector<RankEnd>& all) {  // rank 1 does not give up first, or does not know rank 2
        return said(all[0], "missing 1 ") || said(all[0], "missing 2 ") || !said(all[0], "came and went") ||
               said(all[1], "missing 0 ") || said(all[1], "missing 2 ");
      });
  for (size_t r = 0; r < 3; ++r) EXPECT_TRUE(said(ends[r], "missing 3 ")) << r << ": " << all_said(ends[r]);
  EXPECT_TRUE(said(ends[0], "rank 1 came and went")) << all_said(ends[0]);
}

TEST(Processes, WithoutRankZeroItIsTheOneMissing) {
  const Place place("127.0.0.1");
  const auto ends = run_ranks(2, [&](ChildRank& me) {
    if (me.rank() == 1) say_outcome(me, {1, 2, place.store(), "token"}, kShort);
  });
  EXPECT_TRUE(said(ends[1], "missing 0 ")) << all_said(ends[1]);
  EXPECT_TRUE(said(ends[1], "Connection refused")) << all_said(ends[1]);
}

// ---- death ----

/// All ranks join and watch; then `end` terminates the victim. The others must be notified of exactly that death.
void expect_death_is_reported(
    const Place& place, const std::function<void(ForkedRanks&, int)>& end,
    const std::function<void(ChildRank&)>& before = [](ChildRank&) {}) {
  constexpr int kVictim = 1;
  ForkedRanks ranks(4, [&](ChildRank& me) {
    const auto link = connect_processes({me.rank(), me.world(), place.store(), "token"}, kLong);
    std::atomic<int> deaths{0};
    std::atomic<int> dead_rank{-1};
    link->watch([&](int r) {
      dead_rank = r;
      ++deaths;
    });
    link->barrier(kLong);
    before(me);
    me.say("ready");
    if (me.rank() == kVictim) me.await("never");
    try {
      link->barrier(kLong);
      me.require(false, "the barrier must not pass");
    } catch (const PeerFailed& error) {
      me.require(error.rank() == kVictim, std::string("named: ") + error.what());
      me.require(error.reason() == ErrorCode::system, "reason");
    }
    while (deaths == 0) ::usleep(1000);
    me.require(dead_rank == kVictim && deaths == 1, "one death, of the victim");
    me.say("told");
    me.await("end");  // so that no rank ends for another reason
    link->leave();
    me.require(deaths == 1, "no more deaths");
  });
  for (int r = 0; r < 4; ++r) ASSERT_TRUE(ranks.wait_until_said(r, "ready", kLong));
  end(ranks, kVictim);
  for (const int r : {0, 2, 3}) ASSERT_TRUE(ranks.wait_until_said(r, "told", kLong));
  ranks.send_to_all("end");
  const auto ends = ranks.finish(kLong);
  for (const size_t r : {0, 2, 3}) EXPECT_TRUE(ends[r].ok()) << ends[r];
}

TEST(Death, OfAKilledRankIsTold) {
  expect_death_is_reported(Place("path"), [](ForkedRanks& ranks, int victim) { ranks.kill(victim); });
}

TEST(Death, IsToldThoughAChildOfTheRankHoldsItsSockets) {
  expect_death_is_reported(
      Place("abstract"), [](ForkedRanks& ranks, int victim) { ranks.kill(victim); },
      [](ChildRank& me) {
        if (me.rank() != 1) return;
        if (::fork() != 0) return;
        try {
          me.await("never");  // stays alive longer than the rank, until the parent sends the rank a line or ends
        } catch (const std::exception&) {
        }
        ::_exit(0);
      });
}

TEST(Death, OrderlyLeavingIsNone) {
  const Place place("path");
  expect_ok(run_ranks(3, [&](ChildRank& me) {
    const auto link = connect_processes({me.rank(), me.world(), place.store(), "token"}, kLong);
    std::atomic<int> deaths{0};
    link->watch([&](int) { ++deaths; });
    link->barrier(kLong);
    if (me.rank() == 2) return link->leave();
    try {
      link->barrier(kLong);
      me.require(false, "the barrier must not pass");
    } catch (const PeerFailed& error) {
      me.require(error.rank() == 2, std::string("named: ") + error.what());
    }
    // The other waiting rank is notified at the same time and may leave first; that is not a death either.
    me.require(deaths == 0, "no deaths");
  }));
}

TEST(Death, AStoppedRankIsOnlyLate) {
  const Place place("path");
  ForkedRanks ranks(2, [&](ChildRank& me) {
    const auto link = connect_processes({me.rank(), me.world(), place.store(), "token"}, kLong);
    std::atomic<int> deaths{0};
    link->watch([&](int) { ++deaths; });
    link->barrier(kLong);
    me.say("ready");
    me.await("go");
    if (me.rank() == 0) {
      try {
        link->barrier(kShort);
        me.require(false, "the barrier must not pass");
      } catch (const RendezvousError& error) {
        me.require(error.missing_ranks() == std::vector<int>{1}, error.what());
      }
      me.require(deaths == 0, "no deaths");
      me.say("waited");
    }
  });
  for (int r = 0; r < 2; ++r) ASSERT_TRUE(ranks.wait_until_said(r, "ready", kLong));
  ranks.kill(1, SIGSTOP);
  ranks.send_to_all("go");
  EXPECT_TRUE(ranks.wait_until_said(0, "waited", kLong));
  ranks.kill(1, SIGCONT);
  expect_ok(ranks.finish(kLong));
}

TEST(Processes, ARankOutOfStepIsAMismatch) {
  const Place place("path");
  expect_ok(run_ranks(2, [&](ChildRank& me) {
    const auto link = connect_processes({me.rank(), 2, place.store(), "token"}, kLong);
    char all[4];
    try {
      if (me.rank() == 0) link->exchange_fds(0, kLong);
      if (me.rank() == 1) link->all_gather("ab", 2, all, kLong);
      me.require(false, "different calls must not match");
    } catch (const Error& error) {
      // The rank that is notified first leaves, and the other rank may be notified of that departure first.
      me.require(error.code() == ErrorCode::mismatch || error.code() == ErrorCode::peer_failed, error.what());
      if (error.code() == ErrorCode::mismatch)
        me.require(std::string(error.what()).find("same calls") != std::string::npos, error.what());
    }
  }));
}

TEST(Processes, ArgumentsAreChecked) {
  const auto refused = [](const JoinSpec& spec, const std::string& part) {
    try {
      connect_processes(spec, kShort);
    } catch (const Error& error) {
      return error.code() == ErrorCode::invalid_argument && std::string(error.what()).find(part) != std::string::npos;
    }
    return false;
  };
  EXPECT_TRUE(refused({0, 0, "unix:/x", "t"}, "world = 0"));
  EXPECT_TRUE(refused({0, 65, "unix:/x", "t"}, "world = 65"));
  EXPECT_TRUE(refused({2, 2, "unix:/x", "t"}, "rank = 2"));
  EXPECT_TRUE(refused({0, 2, "unix:/x", ""}, "token"));
  EXPECT_TRUE(refused({0, 2, "/x", "t"}, "store = \"/x\""));
}

TEST(Processes, RankZeroMustRunWhereTheStoreIs) {
  const auto ends = run_ranks(1, [](ChildRank& me) { say_outcome(me, {0, 2, "tcp://192.0.2.77:4711", "token"}, kLong); });
  EXPECT_TRUE(said(ends[0], "not an address of this machine")) << all_said(ends[0]);
}

}  // namespace
}  // namespace switchyard

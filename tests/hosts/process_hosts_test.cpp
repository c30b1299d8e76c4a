// SPDX-License-Identifier: Apache-2.0
// Multi-host groups over loopback, with processes as ranks. The ranks meet, transfer bytes, and detect ranks that die, stop,
// leave, abort or make different calls. All deadlines are longer than the time limit of this program, except where a test waits
// for one.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>

#include "exchange/group/impl.hpp"
#include "harness/outcome.hpp"
#include "modes/normal/normal_rig.hpp"
#include "multiproc/meeting.hpp"

namespace switchyard::test {
namespace {

using namespace std::chrono_literals;
using harness::Outcome;
using harness::outcome_of;

GroupOptions options_of(const std::string& host, Milliseconds timeout = 600s) {
  GroupOptions options;
  options.heap_bytes = size_t{1} << 20;
  options.timeout = timeout;
  options.rendezvous_timeout = 60s;
  options.host = host;
  return options;
}

struct Hosts {
  const char* name;
  const char* store;
  int world;
  const char* host;
  int hosts;
};
const Hosts kHosts[] = {{"OneEach", "127.0.0.1", 2, "a,b", 2},       {"Three", "127.0.0.1", 3, "a,b,c", 3},
                        {"Unequal", "127.0.0.1", 5, "a,a,a,b,b", 2}, {"Interleaved", "127.0.0.1", 8, "a,b,c,d", 4},
                        {"OverPath", "path", 4, "a,b", 2},           {"OverV6", "[::1]", 3, "a,a,b", 2},
                        {"OneHost", "127.0.0.1", 3, "", 1}};

class ProcessHosts : public testing::TestWithParam<Hosts> {};

void expect_all_ok(const std::vector<RankEnd>& ends) {
  for (const RankEnd& end : ends) EXPECT_TRUE(end.ok()) << end;
}

TEST_P(ProcessHosts, MapTheirOwnRanksAndGatherFromAll) {
  const Place place(GetParam().store);
  expect_all_ok(run_ranks(GetParam().world, [&](ChildRank& me) {
    Group group = Group::connect(me.rank(), me.world(), place.store(), "token", options_of(GetParam().host));
    me.require(group.hosts() == GetParam().hosts, "number of hosts");
    for (int r = 0; r < group.size(); ++r) {
      const bool mapped = group.impl().heap->view().base[r] != nullptr;
      me.require(mapped == (group.host_of(r) == group.host()), "what is mapped of rank " + std::to_string(r));
      me.require(group.host_of(r) == group.impl().host_map().host_of(r), "host of a rank");
    }
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{1000}, size_t{3'000'000}}) {
      group.barrier();
      std::vector<unsigned char> mine(bytes, static_cast<unsigned char>(group.rank() + 1)),
          all(bytes * static_cast<size_t>(group.size()));
      group.all_gather(mine.data(), bytes, all.data());
      for (int r = 0; r < group.size(); ++r)
        for (size_t i = 0; i < bytes; i += 997)
          me.require(all[static_cast<size_t>(r) * bytes + i] == r + 1, "gathered byte " + std::to_string(i));
    }
    group.sleep();
    group.wake();
    group.barrier();
  }));
}

void send_all(int fd, const std::vector<unsigned char>& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::send(fd, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (n > 0) done += static_cast<size_t>(n);
    if (n < 0 && errno != EAGAIN) throw std::runtime_error("send");
    if (n < 0) ::usleep(1000);
  }
}

std::vector<unsigned char> receive_all(int fd, size_t bytes) {
  std::vector<unsigned char> all(bytes);
  for (size_t done = 0; done < bytes;) {
    pollfd entry = {fd, POLLIN, 0};
    if (::poll(&entry, 1, 20000) != 1) throw std::runtime_error("nothing came");
    const ssize_t n = ::recv(fd, all.data() + done, bytes - done, MSG_DONTWAIT);
    if (n <= 0) throw std::runtime_error("recv");
    done += static_cast<size_t>(n);
  }
  return all;
}

/// Connects twice, because each call creates new sockets. Ranks that have more data than a socket accepts take turns sending.
TEST_P(ProcessHosts, AreConnectedByRails) {
  const Place place(GetParam().store);
  expect_all_ok(run_ranks(GetParam().world, [&](ChildRank& me) {
    Group group = Group::connect(me.rank(), me.world(), place.store(), "token", options_of(GetParam().host));
    auto& link = *group.impl().bootstrap;
    for (int round = 0; round < 2; ++round) {
      const auto rails = link.connect_rails(20s);
      for (int r = 0; r < group.size(); ++r) {
        const int fd = rails[static_cast<size_t>(r)].get();
        me.require((fd >= 0) == link.host_map().exchange_rows(me.rank(), r), "a rail to " + std::to_string(r));
        if (fd < 0) continue;
        std::vector<unsigned char> bytes(100'000);
        for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 7 + static_cast<size_t>(round));
        bytes[0] = static_cast<unsigned char>(std::min(me.rank(), r));
        bytes[1] = static_cast<unsigned char>(std::max(me.rank(), r));
        if (me.rank() < r) send_all(fd, bytes);
        me.require(receive_all(fd, bytes.size()) == bytes, "bytes of rank " + std::to_string(r));
        if (me.rank() > r) send_all(fd, bytes);
      }
      link.barrier(20s);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Groups, ProcessHosts, testing::ValuesIn(kHosts),
                         [](const auto& d) { return std::string(d.param.name); });

/// Two processes, each of which is a host with two ranks as threads that join separately.
TEST(ProcessHostsOfThreads, JoinAndExchangeRows) {
  const Place place("127.0.0.1");
  expect_all_ok(run_ranks(2, [&](ChildRank& me) {
    std::vector<std::string> wrong(2);
    launch::on_threads(2, [&](size_t thread) {
      wrong[thread] = outcome_of([&] {
                        const int rank = 2 * me.rank() + static_cast<int>(thread);
                        GroupOptions options = options_of("a,a,b,b", 60s);
                        options.heap_bytes = size_t{8} << 20;
                        Group group = Group::connect(rank, 4, place.store(), "token", options);
                        if (group.hosts() != 2 || group.host() != me.rank()) throw Error(ErrorCode::mismatch, "hosts");
                        harness::NormalRig rig(group);
                        for (int round = 0; round < 5; ++round) rig.round();
                        group.barrier();
                      }).text;
    });
    me.require(wrong[0].empty() && wrong[1].empty(), wrong[0] + "; " + wrong[1]);
  }));
}

/// Reports to the parent how a call on this rank ended.
void say(ChildRank& me, const Outcome& o) {
  me.say(harness::code_name(o.code) + " rank " + std::to_string(std::max(o.failed_rank, o.report.awaited_rank)) + ": " +
         o.text);
}

TEST(ProcessHostsFaults, WithAnotherTokenNobodyGetsIn) {
  const auto ends = with_enough_time(
      [](Milliseconds deadline) {
        const Place place("127.0.0.1");
        return run_ranks(3, [&](ChildRank& me) {
          GroupOptions options = options_of("a,b");
          options.rendezvous_timeout = deadline;
          const char* const token = me.rank() == 2 ? "another" : "token";
          say(me, outcome_of([&] { Group::connect(me.rank(), me.world(), place.store(), token, options); }));
        });
      },
      [](const std::vector<RankEnd>& all) { return said(all[0], "nobody was turned away"); });
  for (const RankEnd& end : ends) EXPECT_TRUE(said(end, "rendezvous rank -1: ")) << all_said(end);
  EXPECT_TRUE(said(ends[0], "its job token is another one")) << all_said(ends[0]);
}

TEST(ProcessHostsFaults, DifferentCallsAreNamedAcrossHosts) {
  const Place place("127.0.0.1");
  const auto ends = run_ranks(4, [&](ChildRank& me) {
    Group group = Group::connect(me.rank(), me.world(), place.store(), "token", options_of("a,a,b,b"));
    group.barrier();
    char every[4];
    say(me, outcome_of([&] {
          if (me.rank() == 3)
            group.all_gather("x", 1, every);
          else
            group.barrier();
        }));
    me.say("done");
    me.require(outcome_of([&] { group.check(); }).code == ErrorCode::mismatch, "sticky");
  });
  for (const RankEnd& end : ends) {
    EXPECT_TRUE(end.ok()) << end;
    EXPECT_TRUE(said(end, "mismatch rank")) << all_said(end);
    EXPECT_TRUE(said(end, "all_gather")) << all_said(end);
    EXPECT_TRUE(said(end, "barrier")) << all_said(end);
  }
}

TEST(ProcessHostsFaults, AnAbortReachesRanksThatWaitAndRanksThatDoNot) {
  const Place place("127.0.0.1");
  ForkedRanks ranks(4, [&](ChildRank& me) {
    Group group = Group::connect(me.rank(), me.world(), place.store(), "token", options_of("a,a,b,b"));
    group.barrier();
    if (me.rank() == 2) group.abort(77);
    const Outcome o = outcome_of([&] {
      if (me.rank() == 0) group.barrier();
      for (;; ::usleep(1000)) group.check();
    });
    say(me, o);
    me.require(static_cast<int>(o.reason) == 77, "the reason given");
    me.await("end");  // no rank leaves before all have been notified
  });
  for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.wait_until_said_first(r, "peer_failed rank 2", kLong));
  ranks.send_to_all("end");
  const auto ends = ranks.finish(kLong);
  for (const RankEnd& end : ends) EXPECT_TRUE(end.ok()) << end << all_said(end);
}

/// Runs `after` in the parent once all ranks have reported that they have met. Ranks to which it sends "go" then call barrier()
/// and report how it ended.
std::vector<RankEnd> ends_of_barrier(const GroupOptions& options, const std::function<void(ForkedRanks&)>& after) {
  const Place place("127.0.0.1");
  ForkedRanks ranks(4, [&](ChildRank& me) {
    Group group = Group::connect(me.rank(), me.world(), place.store(), "token", options);
    group.barrier();
    me.say("met");
    me.await("go");
    const Outcome o = outcome_of([&] { group.barrier(); });
    say(me, o);
    if (o.code == ErrorCode::peer_timeout) {
      me.say(std::string("site ") + o.report.site);
      me.say(o.report.silent_ms >= 500 ? "silent" : "not silent");
    }
    me.await("end");
  });
  for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.wait_until_said(r, "met", kLong));
  after(ranks);
  ranks.send_to_all("end");
  return ranks.finish(kLong);
}
void go(ForkedRanks& ranks, const std::vector<int>& which) {
  for (const int r : which) ranks.send(r, "go");
}

TEST(ProcessHostsFaults, AKilledRankIsNoticedByAllHosts) {
  for (const int killed : {1, 3}) {
    const auto ends = ends_of_barrier(options_of("a,a,b,b"), [&](ForkedRanks& ranks) {
      go(ranks, killed == 1 ? std::vector{0, 2, 3} : std::vector{0, 1, 2});
      ranks.kill(killed);
      for (int r = 0; r < 4; ++r)
        EXPECT_TRUE(r == killed || ranks.wait_until_said_first(r, "peer_failed rank " + std::to_string(killed), kLong));
    });
    for (const RankEnd& end : ends) EXPECT_TRUE(end.rank == killed || said(end, "is gone")) << all_said(end);
  }
}

TEST(ProcessHostsFaults, AKilledHostIsNoticed) {
  ends_of_barrier(options_of("a,a,b,b"), [&](ForkedRanks& ranks) {
    go(ranks, {0, 1});
    ranks.kill(2);
    ranks.kill(3);
    for (const int r : {0, 1}) EXPECT_TRUE(ranks.wait_until_said_first(r, "peer_failed rank ", kLong));
  });
}

TEST(ProcessHostsFaults, ARankThatLeftIsNoDeath) {
  const Place place("127.0.0.1");
  const auto ends = run_ranks(4, [&](ChildRank& me) {
    Group group = Group::connect(me.rank(), me.world(), place.store(), "token", options_of("a,a,b,b"));
    group.barrier();
    if (me.rank() == 3) return;  // an orderly leave
    const Outcome o = outcome_of([&] { group.barrier(); });
    say(me, o);
  });
  for (const RankEnd& end : ends) {
    EXPECT_TRUE(end.ok()) << end;
    if (end.rank != 3) {
      EXPECT_TRUE(said(end, "peer_failed rank 3")) << all_said(end);
      EXPECT_TRUE(said(end, "left the group")) << all_said(end);
    }
  }
}

/// The data from a rank that has left remains available to the others, which continue to run.
TEST(ProcessHostsFaults, ARankThatIsDoneMayLeave) {
  const Place place("127.0.0.1");
  for (int round = 0; round < 10; ++round) {
    expect_all_ok(run_ranks(4, [&](ChildRank& me) {
      Group group = Group::connect(me.rank(), me.world(), place.store(), "token", options_of("a,b"));
      std::vector<char> mine(200'000, static_cast<char>(me.rank())), all(mine.size() * 4);
      if (me.rank() == round % 4) ::usleep(20000);
      group.all_gather(mine.data(), mine.size(), all.data());
      for (size_t r = 0; r < 4; ++r) me.require(all[r * mine.size() + 199'999] == static_cast<char>(r), "bytes");
    }));
  }
}

/// Stops ranks 2 and 3 of "a,a,b,b" while `body` runs.
template <class Body>
void with_host_1_stopped(ForkedRanks& ranks, const Body& body) {
  for (const int r : {2, 3}) ranks.kill(r, SIGSTOP);
  body();
  for (const int r : {2, 3}) ranks.kill(r, SIGCONT);
}

/// A stopped rank sends nothing, which looks like a network that drops all packets. It is silent before the others wait.
TEST(ProcessHostsFaults, AWaitForASilentHostEndsAtItsDeadline) {
  const auto ends = ends_of_barrier(options_of("a,a,b,b", 1200ms), [&](ForkedRanks& ranks) {
    with_host_1_stopped(ranks, [&] {
      go(ranks, {0, 1});
      for (const int r : {0, 1}) EXPECT_TRUE(ranks.wait_until_said_first(r, "peer_timeout rank 2", kLong));
    });
  });
  for (const int r : {0, 1}) {
    const RankEnd& end = ends[static_cast<size_t>(r)];
    EXPECT_TRUE(said(end, "its host has been silent for")) << all_said(end);
    EXPECT_TRUE(said(end, "site network")) << all_said(end);
  }
}

/// A stopped rank is detected by its own host and by other hosts. A wait for a running rank is attributed to the stopped rank.
TEST(ProcessHostsFaults, ARankThatStandsStillIsSeen) {
  const Place place("127.0.0.1");
  ForkedRanks ranks(3, [&](ChildRank& me) {
    Group group = Group::connect(me.rank(), me.world(), place.store(), "token", options_of("a,a,b"));
    const auto& link = *group.impl().bootstrap;
    group.barrier();
    me.say("met");
    me.await("look");
    const auto end = std::chrono::steady_clock::now() + 30s;
    const auto wait_until_still = [&](bool still) {
      while (link.is_stalled(1) != still && std::chrono::steady_clock::now() < end) ::usleep(1000);
      return link.is_stalled(1) == still;
    };
    if (me.rank() != 1) {
      const int other = 2 - me.rank();
      me.require(wait_until_still(true), "rank 1 stands still");
      me.require(link.cause_of_wait(1) == 1 && link.cause_of_wait(other) == 1, "whom a wait is for");
      me.say("seen");
      me.require(wait_until_still(false), "rank 1 runs again");
      if (me.rank() == 0) me.require(link.cause_of_wait(0) == 0 && link.cause_of_wait(2) == 2, "nobody stands still");
    }
    me.await("end");
  });
  for (int r = 0; r < 3; ++r) EXPECT_TRUE(ranks.wait_until_said(r, "met", kLong));
  ranks.kill(1, SIGSTOP);
  ranks.send_to_all("look");
  for (const int r : {0, 2}) EXPECT_TRUE(ranks.wait_until_said(r, "seen", kLong));
  ranks.kill(1, SIGCONT);
  ranks.send_to_all("end");
  expect_all_ok(ranks.finish(kLong));
}

TEST(ProcessHostsFaults, AShortSilenceIsNotNoticed) {
  const auto ends = ends_of_barrier(options_of("a,a,b,b", 60s), [&](ForkedRanks& ranks) {
    go(ranks, {0, 1});
    with_host_1_stopped(ranks, [&] { ::usleep(2'000'000); });
    go(ranks, {2, 3});
    for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.wait_until_said_first(r, "ok rank -1", kLong));
  });
  expect_all_ok(ends);
}

TEST(ProcessHostsFaults, AHostThatIsSilentForLongerThanAllowedIsDead) {
  GroupOptions options = options_of("a,a,b,b");
  options.silence = 1s;
  const auto ends = ends_of_barrier(options, [&](ForkedRanks& ranks) {
    go(ranks, {0, 1});
    with_host_1_stopped(ranks, [&] {
      for (const int r : {0, 1}) EXPECT_TRUE(ranks.wait_until_said_first(r, "peer_failed rank ", kLong));
    });
  });
  for (const int r : {0, 1}) {
    const RankEnd& end = ends[static_cast<size_t>(r)];
    EXPECT_TRUE(said(end, "its host has been silent for")) << all_said(end);
  }
}

TEST(ProcessHostsFaults, RanksWithoutAPlaceAmongNamedHostsAreToldSo) {
  const Place place("path");
  const auto ends = run_ranks(2, [&](ChildRank& me) {
    say(me, outcome_of(
                [&] { Group::connect(me.rank(), me.world(), place.store(), "token", options_of(me.rank() == 0 ? "a" : "")); }));
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(said(end, "rank 1 listens nowhere for those of others")) << all_said(end);
}

}  // namespace
}  // namespace switchyard::test

// SPDX-License-Identifier: Apache-2.0
// Exchanges between processes that die, stop, leave or fall silent: the other processes end with an error that names the rank,
// and no resources remain.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "exchange/group/impl.hpp"
#include "faults/watched_calls.hpp"
#include "harness/fleet.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::GroupOptions;
using switchyard::Staging;

GroupOptions options_with(std::chrono::milliseconds timeout) {
  GroupOptions o;
  o.heap_bytes = size_t{4} << 20;
  o.timeout = timeout;
  o.num_warps = 2;
  return o;
}

Fleet fleet_of(int world, std::chrono::milliseconds timeout) {
  Fleet fleet;
  fleet.world = world;
  fleet.options = options_with(timeout);
  return fleet;
}

/// Named shared memory created by this library, and temporary folders of this test process.
std::set<std::string> named_memory() {
  std::set<std::string> names;
  for (const auto& [folder, part] : {std::pair<std::string, std::string>{"/dev/shm", "switchyard"}, {"/tmp", store_prefix()}}) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      const std::string path = entry.path();
      if (path.find(part) != std::string::npos) names.insert(path);
    }
  }
  return names;
}

/// Number of shared mappings in this process that have no name in any file system.
int anonymous_segments() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:") != std::string::npos;
  return count;
}

/// Makes calls until one fails, and returns its outcome.
Outcome exchange_until_failure(Group& group, Staging staging) {
  return outcome_of([&] {
    NormalRig rig(group, NormalRig::config(staging));
    while (true) rig.round();
  });
}

void expect_named(const Outcome& o, int rank, Failures& f) {
  const bool failed = o.code == ErrorCode::peer_failed && o.failed_rank == rank && o.reason == ErrorCode::system;
  const bool timed_out = o.code == ErrorCode::peer_timeout && o.report.awaited_rank == rank;
  f.check(failed || timed_out, std::string("ended with ") + switchyard::to_string(o.code) + ": " + o.text);
}

/// A rank is killed in the middle of its calls, at a different moment each time.
TEST(Killed, OthersNameItAndNothingStays) {
  const auto before = named_memory();
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    for (int trial = 0; trial < 6; ++trial) {
      const int world = 2 + trial % 3, victim = trial % world;
      const auto failures = run_processes(
          fleet_of(world, 20s),
          [&](Group& group, Failures& f) {
            if (group.rank() == victim) {
              std::thread([&] {
                std::this_thread::sleep_for(std::chrono::microseconds(20000 + trial * 3713));
                ::kill(::getpid(), SIGKILL);
              }).detach();
              (void)exchange_until_failure(group, staging);
              f.add("survived its own death");
              return;
            }
            expect_named(exchange_until_failure(group, staging), victim, f);
            const Outcome sticky = outcome_of([&] { group.check(); });
            f.check(sticky.code == ErrorCode::peer_failed, "not sticky: " + sticky.text);
          },
          uint64_t{1} << victim);
      EXPECT_EQ(joined(failures), "");
    }
  }
  EXPECT_EQ(named_memory(), before);
  EXPECT_EQ(anonymous_segments(), 0);
}

TEST(Killed, WhileFormingTheObject) {
  const auto failures = run_processes(
      fleet_of(3, 20s),
      [&](Group& group, Failures& f) {
        if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
        expect_named(outcome_of([&] {
                       NormalRig rig(group);
                       rig.round();
                     }),
                     1, f);
      },
      uint64_t{1} << 1);
  EXPECT_EQ(joined(failures), "");
}

class AKilledProcess : public testing::TestWithParam<WatchedCall> {};

/// A process is killed in a call of any mode, while the others wait for it or are still making the previous calls. All
/// deadlines are longer than the time limit of this program.
TEST_P(AKilledProcess, IsNamedByTheOthers) {
  Fleet fleet = fleet_of(3, 600s);
  fleet.options.rendezvous_timeout = 600s;
  const auto body = [&](Group& group, Failures& f) {
    const Outcome o = outcome_of([&] {
      GetParam().play(group, [&](const std::function<void()>& call) {
        if (group.rank() == 1) ::raise(SIGKILL);
        call();
      });
    });
    f.equal(std::string("peer_failed"), code_name(o.code), "code of " + o.text);
    f.equal(1, o.failed_rank, "failed rank");
  };
  EXPECT_EQ(joined(run_processes(fleet, body, uint64_t{1} << 1)), "");
}

INSTANTIATE_TEST_SUITE_P(Killed, AKilledProcess, testing::ValuesIn(all_calls()),
                         [](const auto& c) { return std::string(c.param.name); });

/// Two of four processes die at once: the others name one of the two.
TEST(Killed, TwoAtOnce) {
  const auto failures = run_processes(
      fleet_of(4, 20s),
      [&](Group& group, Failures& f) {
        const Outcome o = outcome_of([&] {  // the others may still be in the first round when the two processes die
          NormalRig rig(group);
          while (true) {
            rig.round();
            if (group.rank() % 2 == 1) ::kill(::getpid(), SIGKILL);
          }
        });
        const int named = o.code == ErrorCode::peer_timeout ? o.report.awaited_rank : o.failed_rank;
        f.check(named == 1 || named == 3 || o.reason == ErrorCode::peer_timeout, o.text);
      },
      uint64_t{0b1010});
  EXPECT_EQ(joined(failures), "");
}

/// An uncaught exception terminates a process without a report.
TEST(Killed, ByAnUncaughtException) {
  const auto failures = run_processes(
      fleet_of(2, 20s),
      [&](Group& group, Failures& f) {
        const Outcome o = outcome_of([&] {  // the other process may still be in the first round
          NormalRig rig(group);
          rig.round();
          if (group.rank() == 0) {
            ::close(2);  // hides the runtime's message
            std::thread([] { throw 1; }).join();
          }
          rig.round();
        });
        expect_named(o, 0, f);
      },
      uint64_t{1} << 0);
  EXPECT_EQ(joined(failures), "");
}

/// A process is alive but not running: only the deadline detects it. When it resumes, it is notified that the others gave up on
/// it.
class Stopped : public testing::TestWithParam<Staging> {};

TEST_P(Stopped, RunsIntoTheDeadlineAndLearnsOfIt) {
  int pids[2];  // rank 1 sends rank 0 its process id
  ASSERT_EQ(::pipe(pids), 0);
  const auto failures = run_processes(fleet_of(2, kSoon), [&](Group& group, Failures& f) {
    NormalRig rig(group, NormalRig::config(GetParam()));
    rig.round();
    if (group.rank() == 1) {
      const pid_t me = ::getpid();
      f.check(::write(pids[1], &me, sizeof me) == sizeof me, "pipe");
      const Outcome o = outcome_of([&] {
        while (true) rig.round();
      });
      // This rank may have been waiting for rank 0 when it was stopped, and then finds that its own deadline has passed.
      f.check(o.code == ErrorCode::peer_failed || o.code == ErrorCode::peer_timeout, o.text);
      return;
    }
    pid_t peer = 0;
    f.check(::read(pids[0], &peer, sizeof peer) == sizeof peer, "pipe");
    ::kill(peer, SIGSTOP);
    const Outcome o = outcome_of([&] {
      while (true) rig.round();
    });
    f.check(o.code == ErrorCode::peer_timeout && o.report.awaited_rank == 1 && o.report.waiting_rank == 0, o.text);
    ::kill(peer, SIGCONT);
  });
  EXPECT_EQ(joined(failures), "");
  ::close(pids[0]);
  ::close(pids[1]);
}

INSTANTIATE_TEST_SUITE_P(Staging, Stopped, testing::Values(Staging::direct, Staging::ring),
                         [](const auto& s) { return s.param == Staging::ring ? "ring" : "direct"; });

TEST(Left, InOrderButTooEarly) {
  const auto failures = run_processes(fleet_of(3, kSoon), [&](Group& group, Failures& f) {
    NormalRig rig(group);
    rig.round();
    if (group.rank() == 2) return;  // its Group is destroyed: an orderly departure
    const Outcome o = outcome_of([&] { rig.round(); });
    f.check(reports_departure(o, 2), shown(o));
  });
  EXPECT_EQ(joined(failures), "");
}

class ALeavingProcess : public testing::TestWithParam<WatchedCall> {};

/// A rank's own code throws, and its objects and its Group are destroyed during unwinding. All deadlines are longer than the
/// time limit of this program.
TEST_P(ALeavingProcess, IsNoticedByThoseWhoWaitForIt) {
  Fleet fleet = fleet_of(3, 600s);
  fleet.options.rendezvous_timeout = 600s;
  const auto failures = run_processes(fleet, [&](Group& group, Failures& f) {
    const auto body = [&] {
      GetParam().play(group, [&](const std::function<void()>& call) {
        if (group.rank() == 1) throw OwnError();
        call();
      });
    };
    try {
      const Outcome o = outcome_of(body);
      f.check(reports_departure(o, 1), shown(o));
    } catch (const OwnError&) {
    }
  });
  EXPECT_EQ(joined(failures), "");
}

/// The departed rank's objects and Group stay alive until its peers have ended. All deadlines are longer than the time limit of
/// this program.
TEST_P(ALeavingProcess, IsNoticedWhileItsObjectsLive) {
  Fleet fleet = fleet_of(3, 600s);
  fleet.options.rendezvous_timeout = 600s;
  int ended[2];  // used by the others to notify rank 1
  ASSERT_EQ(::pipe(ended), 0);
  const auto failures = run_processes(fleet, [&](Group& group, Failures& f) {
    GetParam().play(group, [&](const std::function<void()>& call) {
      char byte = 0;
      if (group.rank() != 1) {
        const Outcome o = outcome_of(call);
        f.check(reports_departure(o, 1), shown(o));
        f.check(::write(ended[1], &byte, 1) == 1, "pipe");
        return;
      }
      group.leave();
      for (int i = 0; i < 2; ++i) f.check(::read(ended[0], &byte, 1) == 1, "pipe");
      const Outcome o = outcome_of(call);
      f.check(o.code == ErrorCode::invalid_argument && o.text.find("has left the group") != std::string::npos, shown(o));
    });
  });
  EXPECT_EQ(joined(failures), "");
  ::close(ended[0]);
  ::close(ended[1]);
}

INSTANTIATE_TEST_SUITE_P(Left, ALeavingProcess, testing::ValuesIn(all_calls()),
                         [](const auto& d) { return std::string(d.param.name); });

TEST(Left, WhileOthersReceiveTheLastCall) {
  const auto failures = run_processes(fleet_of(3, 60s), [&](Group& group, Failures&) {
    LowLatencyRig rig(group);
    rig.round();
    rig.dispatch();
    const auto rows = rig.combine_send();
    if (group.rank() == 2) std::this_thread::sleep_for(300ms);
    rows();
  });
  EXPECT_EQ(joined(failures), "");
}

/// Objects that a child inherits and destroys when it ends.
struct Inherited {
  std::vector<Group> groups;
  std::vector<NormalRig> normal;
  std::vector<LowLatencyRig> low_latency;
  std::vector<switchyard::Dispatched> rows;
  std::vector<switchyard::RegisteredMemory> registered;
  ~Inherited() { clear(); }
  void clear() {  // destroys them in the order required by objects and groups
    registered.clear();
    rows.clear();
    low_latency.clear();
    normal.clear();
    groups.clear();
  }
};

/// Forks a child that runs `first` and then ends with exit(), which runs the destructors of static objects. Returns false if
/// the child did not end or was terminated by a signal.
bool child_exits(const std::function<void()>& first) {
  const pid_t child = ::fork();
  if (child == 0) {
    first();
    std::exit(0);
  }
  int status = 0;
  for (int i = 0; i < 3000; ++i) {
    if (::waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status);
    std::this_thread::sleep_for(10ms);
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return false;
}

/// Calls on every object and on the group.
std::vector<std::function<void()>> calls_of(Inherited& kept) {
  Group& group = kept.groups.back();
  return {[&] { kept.normal[0].dispatch(); },
          [&] { kept.normal[0].combine(kept.rows[0]); },
          [&] { (void)kept.normal[0].exchange.allocate_rows(kept.rows[0].handle, switchyard::DType::bf16); },
          [&] { kept.low_latency[0].dispatch(); },
          [&] { kept.low_latency[0].combine(); },
          [&] { FlatRig flat(group); },
          [&] { SmallLedger ledger(group); },
          [&] { FusedMoeRig fused(group); },
          [&] { group.barrier(); },
          [&] { (void)group.register_memory(nullptr, 0); },
          [&] { group.sleep(); },
          [&] { group.check(); }};
}

bool reports_fork(const Outcome& o) {
  if (o.code == ErrorCode::invalid_argument && o.text.find("this process was forked") != std::string::npos) return true;
  std::fprintf(stderr, "%s\n", shown(o).c_str());
  return false;
}

TEST(ForkedChild, EndsWithoutItsParentsGroup) {
  const auto failures = run_processes(fleet_of(3, 60s), [&](Group& given, Failures& f) {
    static Inherited kept;
    kept.groups.push_back(std::move(given));
    Group& group = kept.groups.back();
    kept.normal.emplace_back(group);
    kept.low_latency.emplace_back(group);
    kept.rows.push_back(kept.normal[0].dispatch());
    const auto round = [&] {
      kept.normal[0].combine(kept.rows[0]);
      kept.rows[0] = kept.normal[0].dispatch();
      kept.low_latency[0].round();
      group.barrier();
    };
    round();
    if (group.rank() > 0) {
      f.check(child_exits([] {}), "exit");
      f.check(child_exits([] { kept.clear(); }), "destruction");
      f.check(child_exits([] {
                kept.groups.back().abort(1);
                const Outcome o = outcome_of([] { kept.groups.back().impl().bootstrap->barrier(1ms); });
                if (o.code != ErrorCode::invalid_argument) ::raise(SIGKILL);
                kept.groups.back().leave();
                for (const std::function<void()>& call : calls_of(kept))
                  if (!reports_fork(outcome_of(call))) ::raise(SIGKILL);
              }),
              "calls of the child");
    }
    round();
    group.barrier();
    kept.clear();
  });
  EXPECT_EQ(joined(failures), "");
}

TEST(ForkedChild, EndsWithoutTheThreadsOfItsParentsGroups) {
  static Inherited kept;
  GroupOptions options = options_with(60s);
  kept.groups = Group::in_process(2, options);
  const auto on_all = [&](const std::function<void(size_t)>& body) {
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  };
  std::vector<std::unique_ptr<NormalRig>> rigs(2);
  on_all([&](size_t r) {
    rigs[r] = std::make_unique<NormalRig>(kept.groups[r]);
    rigs[r]->round();
  });
  std::thread waits([&] { kept.groups[1].barrier(); });  // waits on an object that a child must not destroy
  std::this_thread::sleep_for(50ms);
  EXPECT_TRUE(child_exits([] {}));
  kept.groups[0].barrier();
  waits.join();
  on_all([&](size_t r) { rigs[r]->round(); });
  rigs.clear();
  kept.groups.clear();
}

/// Ranks may leave in any order after the last common call without disturbing other ranks.
TEST(Left, InOrderWhenDone) {
  const auto failures = run_processes(fleet_of(4, 20s), [&](Group& group, Failures&) {
    NormalRig rig(group);
    for (int i = 0; i < 20; ++i) rig.round();
    std::this_thread::sleep_for(std::chrono::milliseconds(group.rank() * 15));
  });
  EXPECT_EQ(joined(failures), "");
}

/// Deadlines may differ between ranks: the first one to expire ends the calls of all ranks.
TEST(Deadlines, MayDifferByRank) {
  Fleet fleet = fleet_of(3, 60s);
  fleet.per_rank.assign(3, fleet.options);
  fleet.per_rank[0].timeout = kSoon;
  fleet.per_rank[1].num_warps = 3;
  const auto failures = run_processes(fleet, [&](Group& group, Failures& f) {
    NormalRig rig(group);
    rig.round();
    if (group.rank() == 2) {
      Outcome o;
      do {
        std::this_thread::sleep_for(20ms);
        o = outcome_of([&] { group.check(); });
      } while (o.code == ErrorCode::ok);
      f.check(o.code == ErrorCode::peer_failed && o.reason == ErrorCode::peer_timeout, o.text);
      return;
    }
    const Outcome o = outcome_of([&] { rig.round(); });
    if (group.rank() == 0) f.check(o.code == ErrorCode::peer_timeout && o.report.awaited_rank == 2, o.text);
    if (group.rank() == 1) {
      f.check(o.code == ErrorCode::peer_timeout ? o.report.awaited_rank == 2 : o.reason == ErrorCode::peer_timeout, o.text);
    }
  });
  EXPECT_EQ(joined(failures), "");
}

/// The failed rank stays alive until the others have ended, so only its abort notifies them. The deadline is longer than the
/// time limit of this program.
TEST(Misuse, EndsSetUpCallsOfThePeers) {
  int ended[2];  // one byte from each peer
  ASSERT_EQ(::pipe(ended), 0);
  const auto failures = run_processes(fleet_of(3, 600s), [&](Group& group, Failures& f) {
    NormalRig rig(group);
    const Outcome o = outcome_of([&] {
      auto x = rig.x();
      x.cols = 8;
      if (group.rank() == 1) (void)rig.exchange.dispatch(x, rig.expert_ids());
      NormalRig another(group);
    });
    char byte = 0;
    if (group.rank() == 1) {
      f.check(o.code == ErrorCode::invalid_argument, o.text);
      for (int peer = 0; peer < 2; ++peer) f.check(::read(ended[0], &byte, 1) == 1, "pipe");
    } else {
      f.check(::write(ended[1], &byte, 1) == 1, "pipe");
      f.check(o.code == ErrorCode::peer_failed && o.failed_rank == 1 && o.reason == ErrorCode::invalid_argument, o.text);
    }
  });
  EXPECT_EQ(joined(failures), "");
  ::close(ended[0]);
  ::close(ended[1]);
}

TEST(Misuse, EndsThePeersAtOnce) {
  const auto failures = run_processes(fleet_of(3, 60s), [&](Group& group, Failures& f) {
    NormalRig rig(group);
    const Outcome o = outcome_of([&] {
      auto x = rig.x();
      if (group.rank() == 1) x.cols = 8;
      (void)rig.exchange.dispatch(x, rig.expert_ids());
    });
    if (group.rank() == 1) {
      f.check(o.code == ErrorCode::invalid_argument, o.text);
    } else {
      f.check(o.code == ErrorCode::peer_failed && o.failed_rank == 1 && o.reason == ErrorCode::invalid_argument, o.text);
    }
  });
  EXPECT_EQ(joined(failures), "");
}

}  // namespace
}  // namespace harness

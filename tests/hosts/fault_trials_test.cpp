// SPDX-License-Identifier: Apache-2.0
// Many trials of each kind of fault between hosts: in a group of four processes on two hosts, a process is killed or stopped,
// or the network is cut, while rows are exchanged. All other processes must end with a typed error that names a rank at fault,
// and no process may remain. Several groups receive the same fault concurrently.
//
// SWITCHYARD_FAULT_TRIALS sets the number of trials of each kind (default 2; the release tier uses 100). Each test prints the
// number of trials that ended as expected. This is a separate program, because it moves into a network namespace.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <iostream>
#include <memory>

#include "harness/draw.hpp"
#include "harness/outcome.hpp"
#include "hosts/networks.hpp"
#include "modes/normal/normal_rig.hpp"
#include "multiproc/meeting.hpp"

namespace switchyard::test {
namespace {

using namespace std::chrono_literals;
using harness::Outcome;
using harness::outcome_of;
using Clock = std::chrono::steady_clock;

constexpr int kWorld = 4, kSideBySide = 5;

constexpr int host_of(int rank) { return rank / 2; }

/// Makes call number `call` of a trial, whose calls are exchange rounds, barriers, or both alternately.
void call_once(int trial, int call, Group& group, harness::NormalRig& rig) {
  const int kind = trial / 4 % 3;
  if (kind == 0 || (kind == 2 && call % 2 == 0))
    rig.round();
  else
    group.barrier();
}

/// A fault in a group, and how the calls of all other ranks must end.
struct Fault {
  const char* name;
  const char* code;
  std::chrono::milliseconds timeout;  ///< timeout of the calls
  bool of_network;                    ///< hosts are network namespaces, one call after "go"; else hosts by name, endless calls
  std::vector<int> (*victims)(int trial);  ///< ranks that do not reach their end
};

/// One group.
class Trial {
 public:
  Trial(const Fault& fault, int number)
      : fault_(fault),
        victims_(fault.victims(number)),
        place_("127.0.0.1"),
        ranks_(kWorld, [&, number](ChildRank& me) { be_rank(me, number); }) {}

  ForkedRanks& ranks() { return ranks_; }
  const std::vector<int>& victims() const { return victims_; }

  void await_all(const char* line) {
    for (int r = 0; r < kWorld; ++r) EXPECT_TRUE(ranks_.wait_until_said(r, line, kLong)) << line << " of rank " << r;
  }
  /// Waits until all other processes have reported how their calls ended.
  void await_ends() {
    for (int r = 0; r < kWorld; ++r)
      if (!is_victim(r)) ranks_.wait_until_said_first(r, "ended ", kLong);
  }
  /// Kills the victims, then lets all other ranks end. Returns a description of the failure, or "" if there was none.
  std::string finish() {
    for (const int r : victims_) ranks_.kill(r);
    ranks_.send_to_all("end");
    std::string wrong;
    for (const RankEnd& end : ranks_.finish(kLong)) {
      const bool good = is_victim(end.rank) ? end.signal == SIGKILL && !end.overdue : end.ok() && blames_rightly(end);
      if (!good) wrong += "rank " + std::to_string(end.rank) + " " + (end.ok() ? "" : end.error) + ": " + all_said(end);
    }
    return wrong;
  }

 private:
  void be_rank(ChildRank& me, int number) const {
    GroupOptions options;
    options.heap_bytes = size_t{8} << 20;
    options.timeout = options.rendezvous_timeout = kLong;
    std::string store = place_.store();
    if (fault_.of_network) {
      Networks::get().enter(host_of(me.rank()));
      store = "tcp://10.77.0.1:" + std::to_string(4711 + number % kSideBySide);
    } else {
      options.host = "a,a,b,b";
    }
    Group group = Group::connect(me.rank(), kWorld, store, "token", options);
    me.require(group.hosts() == 2 && group.host() == host_of(me.rank()), "two hosts");
    harness::NormalRig rig(group);
    for (int call = 0; call < 2; ++call) call_once(number, call, group, rig);
    group.barrier();
    group.set_timeout(fault_.timeout);
    me.say("met");
    if (fault_.of_network) me.await("go");
    const Outcome o = outcome_of([&] {
      for (int call = 0; call == 0 || !fault_.of_network; ++call) call_once(number, call, group, rig);
    });
    me.say("ended " + harness::code_name(o.code) + " " + std::to_string(std::max(o.failed_rank, o.report.awaited_rank)) + " " +
           o.report.site + " " + o.text);
    me.await("end");
  }

  bool is_victim(int rank) const { return std::find(victims_.begin(), victims_.end(), rank) != victims_.end(); }
  /// Whether a rank blames a victim or, for network faults, a rank of the other host.
  bool blames_rightly(const RankEnd& end) const {
    for (int blamed = -1; blamed < kWorld; ++blamed) {
      const bool right = fault_.code == std::string("ok")
                             ? blamed < 0
                             : blamed >= 0 && (fault_.of_network ? host_of(blamed) != host_of(end.rank) : is_victim(blamed));
      const std::string first = std::string("ended ") + fault_.code + " " + std::to_string(blamed) + " ";
      if (right && std::any_of(end.said.begin(), end.said.end(), [&](const auto& line) { return line.starts_with(first); }))
        return true;
    }
    return false;
  }

  const Fault& fault_;
  const std::vector<int> victims_;
  const Place place_;
  ForkedRanks ranks_;
};
using Batch = std::vector<std::unique_ptr<Trial>>;

/// Runs all trials of one kind of fault. `strike` applies the fault to the groups of a batch after all of them have met.
void run_trials(const Fault& fault, const std::function<void(Batch&, int trial)>& strike) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // orphaned child processes become children of this process
  const int trials = static_cast<int>(harness::from_environment("SWITCHYARD_FAULT_TRIALS", 2));
  int good = 0, orphans = 0;
  std::chrono::milliseconds longest{0};
  for (int done = 0; done < trials;) {
    const int first = done;
    Batch batch;
    for (; done < trials && done < first + kSideBySide; ++done) batch.push_back(std::make_unique<Trial>(fault, done));
    for (auto& trial : batch) trial->await_all("met");
    const auto begin = Clock::now();
    strike(batch, first);
    for (auto& trial : batch) trial->await_ends();
    longest = std::max(longest, std::chrono::ceil<std::chrono::milliseconds>(Clock::now() - begin));
    if (fault.of_network) Networks::get().mend();
    for (size_t i = 0; i < batch.size(); ++i) {
      const std::string wrong = batch[i]->finish();
      EXPECT_EQ(wrong, "") << fault.name << ", trial " << first + static_cast<int>(i);
      good += wrong.empty() ? 1 : 0;
    }
    while (::waitpid(-1, nullptr, WNOHANG) >= 0) ++orphans;
    EXPECT_EQ(errno, ECHILD);
  }
  EXPECT_EQ(orphans, 0);
  std::cout << fault.name << ": " << good << " of " << trials << " trials as they should be, " << orphans
            << " processes left, all told after at most " << longest.count() << " ms\n";
}

/// Waits between 0 and 5 ms after the ranks have met, so the fault can hit any point of a call.
void wait_a_moment(int trial) {
  ::usleep(static_cast<useconds_t>(harness::Draw(static_cast<uint64_t>(trial) + 1).between(0, 5000)));
}

std::vector<int> one_rank(int trial) { return {trial % kWorld}; }
std::vector<int> one_host(int trial) { return trial % 2 == 0 ? std::vector{2, 3} : std::vector{0, 1}; }
std::vector<int> nobody(int) { return {}; }

void send_to_victims(Batch& batch, int trial, int signal) {
  for (auto& each : batch) {
    wait_a_moment(trial++);
    for (const int r : each->victims()) each->ranks().kill(r, signal);
  }
}

TEST(FaultTrials, KilledProcess) {
  run_trials({"a killed process", "peer_failed", kLong, false, one_rank},
             [](Batch& batch, int trial) { send_to_victims(batch, trial, SIGKILL); });
}

TEST(FaultTrials, KilledHost) {
  run_trials({"a killed host", "peer_failed", kLong, false, one_host},
             [](Batch& batch, int trial) { send_to_victims(batch, trial, SIGKILL); });
}

TEST(FaultTrials, StoppedProcess) {
  run_trials({"a stopped process", "peer_timeout", harness::kSoon, false, one_rank},
             [](Batch& batch, int trial) { send_to_victims(batch, trial, SIGSTOP); });
}

class NetworkTrials : public testing::Test {
 protected:
  void SetUp() override {
    if (!Networks::get().problem().empty()) GTEST_SKIP() << Networks::get().problem();
  }
  /// The network drops all packets for two seconds, starting immediately before the call.
  static void lose_everything(Batch& batch, int) {
    Networks::get().cut();
    for (auto& each : batch) each->ranks().send_to_all("go");
    ::usleep(2'000'000);
    Networks::get().mend();
  }
};

TEST_F(NetworkTrials, LossBeyondTheDeadline) {
  run_trials({"a network that loses everything for 2 s, deadline 1 s", "peer_timeout", 1s, true, nobody}, lose_everything);
}

TEST_F(NetworkTrials, LossWithinTheDeadline) {
  run_trials({"a network that loses everything for 2 s, deadline 10 s", "ok", 10s, true, nobody}, lose_everything);
}

}  // namespace
}  // namespace switchyard::test

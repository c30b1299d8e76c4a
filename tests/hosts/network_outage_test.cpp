// SPDX-License-Identifier: Apache-2.0
// Two hosts in network namespaces of their own, with a bridge between them that can lose everything. Needs Linux that lets this
// user make namespaces, and ip(8); without them the tests are skipped and say so. A program of its own: it moves to a
// namespace.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>

#include "harness/outcome.hpp"
#include "multiproc/meeting.hpp"

namespace switchyard::test {
namespace {

using namespace std::chrono_literals;
using detail::UniqueFd;
using harness::Outcome;
using harness::outcome_of;

UniqueFd current_network() { return UniqueFd(::open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC)); }

/// Becomes root of a new user namespace, or stays who it is if that is root already.
bool may_make_networks() {
  const std::string user = std::to_string(::geteuid()), group = std::to_string(::getegid());
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return ::unshare(CLONE_NEWNET) == 0;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/uid_map") << "0 " << user << " 1";
  std::ofstream("/proc/self/gid_map") << "0 " << group << " 1";
  return true;
}

/// A bridge in this process's network, and a network with a link to it for each of two hosts, 10.77.0.1 and 10.77.0.2.
class Networks {
 public:
  /// Why there are none, or "".
  const std::string& problem() const { return problem_; }
  void enter(int host) const {
    if (::setns(hosts_[host].get(), CLONE_NEWNET) != 0) throw std::runtime_error("setns");
  }
  /// Everything between the hosts is lost, or arrives again.
  void cut() const { run("ip link set port1 down"); }
  void mend() const { run("ip link set port1 up"); }

  static const Networks& get() {
    static const Networks networks;
    return networks;
  }

 private:
  Networks() {
    if (!may_make_networks()) {
      problem_ = "this user may not make network namespaces";
      return;
    }
    const UniqueFd here = current_network();
    for (UniqueFd& host : hosts_) {
      if (::unshare(CLONE_NEWNET) != 0) problem_ = "unshare(CLONE_NEWNET) failed";
      host = current_network();
    }
    if (::setns(here.get(), CLONE_NEWNET) != 0) problem_ = "setns failed";
    if (!run("ip link add bridge type bridge && ip link set bridge up")) problem_ = "ip(8) cannot make a bridge";
    for (int h = 0; h < 2 && problem_.empty(); ++h) {
      const std::string number = std::to_string(h), pid = std::to_string(::getpid());
      const std::string there = "ip link set lo up && ip link add eth0 type veth peer name port" + number + " netns " + pid +
                                " && ip addr add 10.77.0." + std::to_string(h + 1) + "/24 dev eth0 && ip link set eth0 up";
      if (!run(there, h) || !run("ip link set port" + number + " master bridge && ip link set port" + number + " up"))
        problem_ = "ip(8) cannot make a link";
    }
  }

  /// In this process's network, or that of a host.
  bool run(const std::string& command, int host = -1) const {
    const pid_t pid = ::fork();
    if (pid == 0) {
      if (host >= 0) enter(host);
      ::execl("/bin/sh", "sh", "-c", (command + " >/dev/null 2>&1").c_str(), nullptr);
      ::_exit(127);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

  UniqueFd hosts_[2];
  std::string problem_;
};

/// Four ranks, two on each host, meet without being told where they are. Once the network has been cut they call barrier();
/// `after` says what else happens; how the call of each ended is in its words.
std::vector<RankEnd> barrier_without_network(GroupOptions options, const std::function<void(ForkedRanks&)>& after) {
  const Networks& networks = Networks::get();
  options.heap_bytes = size_t{1} << 20;
  ForkedRanks ranks(4, [&](ChildRank& me) {
    networks.enter(me.rank() / 2);
    Group group = Group::connect(me.rank(), me.world(), "tcp://10.77.0.1:4711", "token", options);
    me.require(group.hosts() == 2 && group.host() == me.rank() / 2, "hosts by their networks");
    group.barrier();
    me.say("met");
    me.await("go");
    const Outcome o = outcome_of([&] { group.barrier(); });
    me.say(harness::code_name(o.code) + " " + o.report.site + " " + o.text);
    me.await("end");
  });
  for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.wait_until_said(r, "met", 30s));
  networks.cut();
  ranks.tell_all("go");
  after(ranks);
  networks.mend();
  ranks.tell_all("end");
  return ranks.finish(kLong);
}

class NetworkOutage : public testing::Test {
 protected:
  void SetUp() override {
    if (!Networks::get().problem().empty()) GTEST_SKIP() << Networks::get().problem();
  }
};

TEST_F(NetworkOutage, ShorterThanTheDeadlineIsNotNoticed) {
  GroupOptions options;
  options.timeout = 40s;
  const auto ends = barrier_without_network(options, [](ForkedRanks& ranks) {
    ::usleep(2'000'000);
    Networks::get().mend();
    for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.wait_until_said_first(r, "ok ", kLong));
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(end.ok()) << end << all_said(end);
}

TEST_F(NetworkOutage, LongerThanTheDeadlineIsAnErrorThatNamesARank) {
  GroupOptions options;
  options.timeout = 1s;
  const auto ends = barrier_without_network(options, [](ForkedRanks& ranks) {
    for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.wait_until_said_first(r, "peer_timeout network ", kLong));
  });
  for (const RankEnd& end : ends) {
    EXPECT_TRUE(said(end, "its host has been silent for")) << all_said(end);
    EXPECT_TRUE(said(end, end.rank < 2 ? "of rank 2" : "of rank 0")) << all_said(end);
  }
}

TEST_F(NetworkOutage, LongerThanTheSilenceAllowedIsADeath) {
  GroupOptions options;
  options.timeout = 600s;
  options.silence = 1500ms;
  const auto ends = barrier_without_network(options, [](ForkedRanks& ranks) {
    for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.wait_until_said_first(r, "peer_failed ", kLong));
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(said(end, "its host has been silent for")) << all_said(end);
}

}  // namespace
}  // namespace switchyard::test

// SPDX-License-Identifier: Apache-2.0
// Rendezvous of ranks in two networks: the effects of machine names and of a firewall between the hosts. The tests are skipped
// with a message if the user cannot create networks.
#include <gtest/gtest.h>
#include <sys/mount.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "harness/outcome.hpp"
#include "hosts/networks.hpp"
#include "multiproc/meeting.hpp"

namespace switchyard::test {
namespace {

using namespace std::chrono_literals;
using harness::Outcome;
using harness::outcome_of;

class MeetingHosts : public testing::Test {
 protected:
  void SetUp() override {
    if (!Networks::get().problem().empty()) GTEST_SKIP() << Networks::get().problem();
  }
};

/// False in a chroot whose root is an ordinary folder: there, mounts cannot be hidden from other processes.
bool root_is_a_mount_point() {
  std::ifstream mounts("/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string id, parent, device, root, at;
    if (fields >> id >> parent >> device >> root >> at && at == "/") return true;
  }
  return false;
}

/// Machines with their own names, set by be_called().
class MeetingNamedHosts : public MeetingHosts {
 protected:
  void SetUp() override {
    MeetingHosts::SetUp();
    if (!IsSkipped() && !root_is_a_mount_point())
      GTEST_SKIP() << "/ is no mount point: /etc/hosts cannot be replaced for one process";
  }
};

GroupOptions options_of(Milliseconds rendezvous) {
  GroupOptions options;
  options.heap_bytes = size_t{1} << 20;
  options.rendezvous_timeout = rendezvous;
  return options;
}

/// Gives the machine of this process a name and a separate /etc/hosts.
void be_called(const std::string& name, const std::string& hosts) {
  char file[] = "/tmp/switchyard-hosts-XXXXXX";
  const detail::UniqueFd fd(::mkstemp(file));
  ChildRank::require(::write(fd.get(), hosts.data(), hosts.size()) == static_cast<ssize_t>(hosts.size()), "a file of names");
  const bool made = ::unshare(CLONE_NEWNS | CLONE_NEWUTS) == 0 && ::sethostname(name.data(), name.size()) == 0 &&
                    ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                    ::mount(file, "/etc/hosts", nullptr, MS_BIND, nullptr) == 0;
  ::unlink(file);
  ChildRank::require(made, std::string("names of a machine: ") + std::strerror(errno));
}

/// Machine 0 is named `first` and resolves that name to `own`; the other machine resolves it to the address of machine 0. Rank
/// r is on machine machines[r] and uses letter r of `places` as its host name.
std::vector<RankEnd> meet_by_name(const std::string& own, const std::vector<int>& machines, const std::string& places,
                                  int hosts) {
  return ForkedRanks(static_cast<int>(machines.size()),
                     [&](ChildRank& me) {
                       const int machine = machines[static_cast<size_t>(me.rank())];
                       Networks::get().enter(machine);
                       be_called(machine == 0 ? "first" : "second",
                                 machine == 0 ? own : "127.0.0.1 localhost\n10.77.0.1 first\n");
                       detail::JoinSpec spec = {me.rank(), me.world(), "tcp://first:4711", "token"};
                       if (!places.empty()) spec.host = places.substr(static_cast<size_t>(me.rank()), 1);
                       const auto link = detail::connect_processes(spec, kLong);
                       me.require(link->host_map().hosts() == hosts, "hosts: " + link->host_map().text());
                       exchange_rounds(*link, 1000);
                       link->connect_rails(kLong);
                       exchange_rounds(*link, 1000);
                       link->leave();
                     })
      .finish(kLong);
}

constexpr char kOnlyLoopback[] = "127.0.0.1 localhost\n127.0.1.1 first.example.org first\n";
constexpr char kLoopbackFirst[] = "127.0.0.1 localhost\n127.0.1.1 first\n10.77.0.1 first\n";

TEST_F(MeetingNamedHosts, AtAMachineThatKnowsItselfByLoopback) {
  for (const char* own : {kOnlyLoopback, kLoopbackFirst}) {
    SCOPED_TRACE(own);
    expect_ok(meet_by_name(own, {0, 0, 1, 1}, "", 2));
    expect_ok(meet_by_name(own, {0, 1, 0, 1}, "", 2));
  }
}

TEST_F(MeetingNamedHosts, SeveralHostsOfThatMachineReachEachOtherToo) {
  expect_ok(meet_by_name(kOnlyLoopback, {0, 0, 0, 1}, "abac", 3));
  expect_ok(meet_by_name(kOnlyLoopback, {0, 0, 0, 0}, "abab", 2));
}

TEST_F(MeetingNamedHosts, NamesThatAreNotItsOwnStayWhereTheyAre) {
  // Rank 0 listens on loopback, which the other machine cannot reach.
  ForkedRanks ranks(2, [](ChildRank& me) {
    Networks::get().enter(me.rank());
    be_called(me.rank() == 0 ? "zeroth" : "second",
              me.rank() == 0 ? "127.0.1.1 first\n" : "127.0.0.1 localhost\n10.77.0.1 first\n");
    const Outcome o = outcome_of([&] { Group::connect(me.rank(), 2, "tcp://first:4711", "token", options_of(1500ms)); });
    me.say(harness::code_name(o.code) + " " + o.text);
  });
  const auto ends = ranks.finish(kLong);
  EXPECT_TRUE(said(ends[0], "does a firewall let them come to 127.0.1.1:4711?")) << all_said(ends[0]);
  EXPECT_TRUE(said(ends[1], "last attempt, at 10.77.0.1:4711: Connection refused")) << all_said(ends[1]);
  for (const RankEnd& end : ends) EXPECT_TRUE(said(end, "rendezvous ")) << all_said(end);
}

TEST_F(MeetingHosts, AFirewallThatLetsOnlyTheStoreThroughIsNamedOnAllRanks) {
  const Networks& networks = Networks::get();
  if (!networks.block_all_but(4711)) GTEST_SKIP() << "ip(8) or the kernel knows no rules by port";
  const auto ends = with_enough_time(
      [](Milliseconds deadline) {
        return run_ranks(4, [&](ChildRank& me) {
          Networks::get().enter(me.rank() / 2);
          const Outcome o =
              outcome_of([&] { Group::connect(me.rank(), 4, "tcp://10.77.0.1:4711", "token", options_of(deadline)); });
          me.say(harness::code_name(o.code) + " " + o.text);
        });
      },
      [](const std::vector<RankEnd>& all) { return said(all[0], "did not come to tcp://"); });
  networks.unblock();
  for (const RankEnd& end : ends) {
    EXPECT_TRUE(said(end, "rendezvous ")) << all_said(end);
    EXPECT_TRUE(said(end, "a firewall between them must let these through")) << all_said(end);
    EXPECT_FALSE(said(end, "is gone")) << all_said(end);
  }
}

}  // namespace
}  // namespace switchyard::test

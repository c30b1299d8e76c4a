// SPDX-License-Identifier: Apache-2.0
// A network between two hosts that temporarily drops all packets. The tests are skipped with a message if the user cannot
// create networks.
#include <gtest/gtest.h>

#include <utility>

#include "harness/outcome.hpp"
#include "hosts/networks.hpp"
#include "multiproc/meeting.hpp"

namespace switchyard::test {
namespace {

using namespace std::chrono_literals;
using harness::Outcome;
using harness::outcome_of;

/// Four ranks, two on each host, meet without configured hosts. After the network is cut, they call barrier(). `after` runs
/// further events. Each rank's messages report how its call ended.
std::vector<RankEnd> barrier_without_network(GroupOptions options, const std::function<void(ForkedRanks&)>& after) {
  const Networks& networks = Networks::get();
  options.heap_bytes = size_t{1} << 20;
  const auto timeout = std::exchange(options.timeout, kLong);
  ForkedRanks ranks(4, [&](ChildRank& me) {
    networks.enter(me.rank() / 2);
    Group group = Group::connect(me.rank(), me.world(), "tcp://10.77.0.1:4711", "token", options);
    me.require(group.hosts() == 2 && group.host() == me.rank() / 2, "hosts by their networks");
    group.barrier();
    group.set_timeout(timeout);
    me.say("met");
    me.await("go");
    const Outcome o = outcome_of([&] { group.barrier(); });
    me.say(harness::code_name(o.code) + " " + o.report.site + " " + o.text);
    me.await("end");
  });
  for (int r = 0; r < 4; ++r) EXPECT_TRUE(ranks.wait_until_said(r, "met", kLong));
  networks.cut();
  ranks.send_to_all("go");
  after(ranks);
  networks.mend();
  ranks.send_to_all("end");
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

// SPDX-License-Identifier: Apache-2.0
// When a rank departs, in any mode, each rank that waits for it is notified, and no other rank is affected. All deadlines are
// longer than the time limit of this program. tests/multiproc/exchange_test.cpp contains the tests with ranks as processes.
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <thread>

#include "faults/watched_calls.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::GroupOptions;

/// Like outcomes(), but every rank leaves as soon as its body has returned or thrown.
std::vector<Outcome> leaving_outcomes(int world, const std::function<void(Group&)>& body) {
  GroupOptions options = options_with(600s);
  options.rendezvous_timeout = 600s;
  auto groups = Group::in_process(world, options);
  std::vector<Outcome> all(groups.size());
  switchyard::launch::on_threads(groups.size(), [&](size_t r) {
    all[r] = outcome_of([&] {
      Group mine = std::move(groups[r]);
      try {
        body(mine);
      } catch (const OwnError&) {
      }
    });
  });
  return all;
}

class ALeavingRank : public testing::TestWithParam<WatchedCall> {};

TEST_P(ALeavingRank, IsNoticedByThoseWhoWaitForIt) {
  const auto all = leaving_outcomes(3, [&](Group& group) {
    const Outcome o = outcome_of([&] {
      GetParam().play(group, [&](const std::function<void()>& call) {
        if (group.rank() == 1) throw OwnError();
        call();
      });
    });
    EXPECT_TRUE(reports_departure(o, 1)) << group.rank() << " " << shown(o);
    EXPECT_EQ(code_name(outcome_of([&] { group.check(); }).code), "peer_failed") << "sticky";
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// The departed rank's objects and Group stay alive until the other ranks have been notified. All deadlines are longer than the
/// time limit of this program.
TEST_P(ALeavingRank, IsNoticedWhileItsObjectsLive) {
  GroupOptions options = options_with(600s);
  options.rendezvous_timeout = 600s;
  std::latch others_ended(2);
  const auto all = outcomes(3, options, [&](Group& group) {
    GetParam().play(group, [&](const std::function<void()>& call) {
      if (group.rank() != 1) {
        const Outcome o = outcome_of(call);
        EXPECT_TRUE(reports_departure(o, 1)) << group.rank() << " " << shown(o);
        others_ended.count_down();
        return;
      }
      group.leave();
      others_ended.wait();
      group.leave();
      expect_text(outcome_of(call), ErrorCode::invalid_argument, "this rank has left the group");
      expect_text(outcome_of([&] { group.check(); }), ErrorCode::invalid_argument, "this rank has left the group");
    });
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

INSTANTIATE_TEST_SUITE_P(Faults, ALeavingRank, testing::ValuesIn(all_calls()),
                         [](const auto& d) { return std::string(d.param.name); });

/// Rank 0 leaves once it has all data that it needs from the last call. Rank 2, which already has the data that it needs from
/// rank 0, is slow.
TEST(ARankThatIsDone, MayLeaveWhileOthersReceive) {
  const auto all = leaving_outcomes(3, [&](Group& group) {
    LowLatencyRig rig(group);
    rig.round();
    rig.dispatch();
    const auto rows = rig.combine_send();
    if (group.rank() == 2) std::this_thread::sleep_for(300ms);
    rows();
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

TEST(ARankThatIsDone, MayLeaveAtAnyTimeAfterItsLastCall) {
  for (int round = 0; round < 60; ++round) {
    const auto all = leaving_outcomes(3, [&](Group& group) {
      if (round % 4 == 0) {
        LowLatencyRig(group).round();
      } else if (round % 4 == 1) {
        FlatRig(group).round();
      } else if (round % 4 == 2) {
        SmallLedger(group).combine();
      } else {
        NormalRig(group, NormalRig::config(round % 8 == 3 ? switchyard::Staging::ring : switchyard::Staging::direct)).round();
      }
      if (group.rank() == round % 3) std::this_thread::sleep_for(std::chrono::microseconds(round * 20));
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << round << ": " << o.text;
  }
}

/// Nothing that a rank does after leave() reaches a peer, neither an error nor an abort.
TEST(ARankThatHasLeft, EndsNoCallOfOthers) {
  std::latch misused(1);
  const auto all = outcomes(3, options_with(600s), [&](Group& group) {
    LowLatencyRig rig(group);
    rig.round();
    rig.dispatch();
    const auto rows = rig.combine_send();
    rows();
    if (group.rank() == 0) {
      group.leave();
      expect_text(outcome_of([&] { rig.round(); }), ErrorCode::invalid_argument, "this rank has left the group");
      group.abort(42);
      misused.count_down();
      return;
    }
    misused.wait();
    group.check();
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// A departure affects only waits for the departed rank: check() succeeds, and the barrier reports the departure.
TEST(ARankThatIsDone, EndsNoWaitForOthers) {
  const auto all = leaving_outcomes(2, [&](Group& group) {
    group.barrier();
    if (group.rank() == 1) return;
    std::this_thread::sleep_for(20ms);
    EXPECT_EQ(code_name(outcome_of([&] { group.check(); }).code), "ok");
    EXPECT_TRUE(reports_departure(outcome_of([&] { group.barrier(); }), 1));
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

}  // namespace
}  // namespace harness

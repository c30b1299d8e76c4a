// SPDX-License-Identifier: Apache-2.0
// FusedMoe on the CPU, with ranks as threads and as processes: every element of every output equals an integer closed form, for
// every world size and every kind of worker. unit/layer/moe_fused_test.cpp tests it with real products.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "harness/draw.hpp"
#include "harness/outcome.hpp"
#include "modes/fused/fused_calls.hpp"

namespace harness {
namespace {

using switchyard::ErrorCode;

class FusedMoes : public testing::TestWithParam<Where> {
 protected:
  static Scenario in_this_world() { return scenario(GetParam().world); }
  static void expect_exact(const Scenario& s) { harness::expect_exact(s, GetParam().workers); }
};

TEST_P(FusedMoes, AreExact) { expect_exact(in_this_world()); }

TEST_P(FusedMoes, AddToWhatIsThereAndNeedNoWeights) {
  Scenario s = in_this_world();
  s.add = true;
  s.weighted = false;
  expect_exact(s);
}

TEST_P(FusedMoes, TakeTokensFromTheHeapAndTFromMemory) {
  Scenario s = in_this_world();
  s.in_heap = s.stated = true;
  expect_exact(s);
}

TEST_P(FusedMoes, DropRoutesBeyondCapacity) {
  Scenario s = in_this_world();
  s.config.overflow = Overflow::drop_and_report;
  s.config.capacity = 7;
  expect_exact(s);
  s.one_expert = true;
  expect_exact(s);
}

TEST_P(FusedMoes, ComeInTwoHalves) {
  Scenario s = in_this_world();
  s.halves = true;
  expect_exact(s);
  s.add = s.stated = s.in_heap = true;
  expect_exact(s);
  s.add = false;
  s.doubled = true;
  s.config.overflow = Overflow::drop_and_report;
  s.config.capacity = 7;
  expect_exact(s);
}

TEST_P(FusedMoes, GiveOneExpertEverything) {
  Scenario s = in_this_world();
  s.one_expert = true;
  s.tile = 1;
  expect_exact(s);
}

TEST_P(FusedMoes, HaveRanksWithoutExpertsAndWithoutTokens) {
  Scenario s = in_this_world();
  s.config.num_experts = (s.world() + 1) / 2;
  s.tile = 1000;
  expect_exact(s);
  s.tokens.assign(s.tokens.size(), 0);
  expect_exact(s);
  s.config.max_tokens = 0;
  expect_exact(s);
}

INSTANTIATE_TEST_SUITE_P(Everywhere, FusedMoes, testing::ValuesIn(everywhere()), where_name);

/// A single worker per rank does all work in turn.
TEST(FusedMoeWorkers, OneSuffices) {
  for (const int world : {1, 2, 3, 8}) {
    Scenario s = scenario(world);
    expect_exact(s, {1, 1, false}, 10);
    s.halves = true;
    expect_exact(s, {1, 1, false}, 10);
  }
}

/// Ranks are processes, because threads of one group always have the same number of workers.
TEST(FusedMoeWorkers, MayDifferByRank) {
  const Scenario s = scenario(3);
  Fleet fleet = fleet_of(3, {2, 2, false}, FusedMoe::heap_bytes(s.config, 3));
  if (ranks_of_suite() == Ranks::processes) {
    fleet.per_rank.assign(3, fleet.options);
    fleet.per_rank[1].num_blocks = fleet.per_rank[1].num_warps = 1;
    fleet.per_rank[2].num_warps = 3;
  }
  const auto failures = run_ranks(ranks_of_suite(), fleet, [&](Group& group, Failures& f) {
    Caller caller(group, s);
    for (int call = 0; call < 5; ++call) caller.call(call, f);
  });
  EXPECT_EQ(joined(failures), "");
}

/// During sleep, the heap releases its memory except for the flags. Two layers of one group do not interfere.
TEST(FusedMoeObject, GoesOnAfterSleep) {
  const Scenario s = scenario(3);
  const Fleet fleet = fleet_of(3, {1, 2, false}, 2 * FusedMoe::heap_bytes(s.config, 3));
  const auto failures = run_ranks(ranks_of_suite(), fleet, [&](Group& group, Failures& f) {
    Caller first(group, s), second(group, s);
    for (int call = 0; call < 3; ++call) {
      first.call(call, f);
      second.call(call + 7, f);
      group.sleep();
      const Outcome end = outcome_of([&] { first.call(call, f); });
      f.equal(std::string("invalid_argument"), code_name(end.code), "code of " + end.text);
      group.wake();
    }
    second.call(3, f);
    first.call(4, f);
  });
  EXPECT_EQ(joined(failures), "");
}

/// Nothing is written, and the layer stays usable.
TEST(FusedMoeCapacity, IsAnErrorOnAllRanks) {
  Scenario s = scenario(3);
  s.config.capacity = 20;
  s.one_expert = true;
  const Fleet fleet = fleet_of(3, {1, 2, false}, FusedMoe::heap_bytes(s.config, 3));
  const auto failures = run_ranks(ranks_of_suite(), fleet, [&](Group& group, Failures& f) {
    Caller caller(group, s);
    std::vector<uint16_t> x(idx(s.config.max_tokens * s.config.hidden)), out(x.size(), 7), untouched = out;
    const std::vector<int32_t> all(idx(s.config.max_tokens * s.config.topk), 0);
    for (int i = 0; i < 2; ++i) {
      const Outcome end = outcome_of([&] {
        caller.layer().forward(x.data(), ExpertIds::of(all.data(), s.config.max_tokens, s.config.topk), nullptr, out.data());
      });
      f.equal(std::string("capacity_exceeded"), code_name(end.code), "code");
      f.check(end.text.find("rank 0 would receive 153 rows, its capacity is 20; ") != std::string::npos, end.text);
      f.check(out == untouched, "out was written");
      std::vector<uint16_t> none(x.size(), 7);
      const std::vector<int32_t> nobody(all.size(), -1);
      caller.layer().forward(x.data(), ExpertIds::of(nobody.data(), s.config.max_tokens, s.config.topk), nullptr, none.data());
      f.check(none == std::vector<uint16_t>(x.size()), "the next call gave no zeros");
    }
  });
  EXPECT_EQ(joined(failures), "");
}

/// A half called out of order, or with arguments for the other half, causes an error that ends the group.
TEST(FusedMoeObject, TakesHalvesInTurn) {
  const auto up = [](FusedMoeRig& rig) { rig.layer.dispatch_up(rig.rows.data(), rig.expert_ids(), nullptr); };
  const auto down = [](FusedMoeRig& rig, const FusedMoeCall& call = {}) {
    rig.layer.down_combine(rig.weights.data(), rig.out.data(), call);
  };
  const auto refused = [&](const std::string& text, bool behind_up, const std::function<void(FusedMoeRig&)>& call) {
    std::vector<Group> groups = Group::in_process(1);
    FusedMoeRig rig(groups[0]);
    rig.round();
    if (behind_up) up(rig);
    expect_text(outcome_of([&] { call(rig); }), ErrorCode::invalid_argument, text);
  };
  refused("down_combine has to follow dispatch_up, which has not been called", false, [&](auto& rig) { down(rig); });
  refused("down_combine has to follow dispatch_up", true, up);
  refused("down_combine has to follow dispatch_up", true, [](auto& rig) { rig.round(); });
  refused("out is null", true, [](auto& rig) { rig.layer.down_combine(nullptr, nullptr); });
  refused("with per_route, down_combine takes the weights", false,
          [](auto& rig) { rig.layer.dispatch_up(rig.rows.data(), rig.expert_ids(), rig.weights.data()); });
  refused("x is null", false, [](auto& rig) { rig.layer.dispatch_up(nullptr, rig.expert_ids(), nullptr); });
  const int32_t tokens = 1;
  refused("MoeLayerCall::device_tokens", true, [&](auto& rig) { down(rig, {.device_tokens = &tokens}); });

  {
    std::vector<Group> groups = Group::in_process(1);
    FusedMoeConfig config = FusedMoeRig::config();
    config.order = CombineOrder::per_rank;
    FusedMoeRig rig(groups[0], config);
    up(rig);
    expect_text(outcome_of([&] { down(rig); }), ErrorCode::invalid_argument, "with per_rank, dispatch_up takes the weights");
  }

  std::vector<Group> groups = Group::in_process(1);
  FusedMoeRig rig(groups[0]);
  rig.round();
  const auto whole = rig.out;
  for (int i = 0; i < 3; ++i) {
    up(rig);
    std::fill(rig.out.begin(), rig.out.end(), uint16_t{7});
    down(rig);
    EXPECT_EQ(rig.out, whole);
  }
  rig.round();
  EXPECT_EQ(rig.out, whole);
}

TEST(FusedMoeObject, ClampsTFromMemory) {
  std::vector<Group> groups = Group::in_process(1);
  FusedMoeRig rig(groups[0]);
  const auto with = [&](int32_t tokens) {
    std::vector<uint16_t> out(rig.out.size(), 7);
    rig.layer.forward(rig.rows.data(), rig.expert_ids(), rig.weights.data(), out.data(), {.device_tokens = &tokens});
    return out;
  };
  rig.round();
  EXPECT_EQ(with(1000), rig.out);
  EXPECT_EQ(with(FusedMoeRig::kTokens), rig.out);
  EXPECT_EQ(with(-3), std::vector<uint16_t>(rig.out.size(), 7));
}

TEST(FusedMoeObject, IsMoved) {
  std::vector<Group> groups = Group::in_process(1);
  FusedMoeRig rig(groups[0]);
  FusedMoe moved = std::move(rig.layer);
  const auto empty = [&](const std::function<void()>& call) {
    expect_text(outcome_of(call), ErrorCode::invalid_argument, "FusedMoe is empty");
  };
  // NOLINTBEGIN(bugprone-use-after-move)
  empty([&] { rig.round(); });
  empty([&] { (void)rig.layer.tokens(); });
  empty([&] { (void)rig.layer.rows(); });
  empty([&] { (void)rig.layer.dropped(); });
  empty([&] { (void)rig.layer.config(); });
  empty([&] { (void)rig.layer.last_call(); });
  // NOLINTEND(bugprone-use-after-move)
  EXPECT_TRUE(moved.dropped().empty());
  rig.layer = std::move(moved);
  rig.round();
  EXPECT_GT(rig.layer.last_call().total_us, 0);
  EXPECT_GT(rig.layer.last_call().local_bytes, 0u);
  EXPECT_EQ(rig.layer.last_call().remote_bytes, 0u);
  EXPECT_EQ(rig.layer.config().intermediate, FusedMoeRig::kIntermediate);
}

/// SWITCHYARD_RANDOM_LAYERS: the number of layers (default: 30).
TEST(FusedMoeShapes, AtRandom) {
  const uint64_t layers = from_environment("SWITCHYARD_RANDOM_LAYERS", 30);
  for (uint64_t i = 0; i < layers && !HasFailure(); ++i) {
    Draw draw(i + 500);
    Scenario s = scenario_at_random(draw);
    s.config.overflow = Overflow::drop_and_report;
    if (draw.one_in(3)) s.config.capacity = draw.between(1, 40);
    s.one_expert = draw.one_in(6);
    s.halves = draw.one_in(3);
    const Workers workers = workers_at_random(draw);
    SCOPED_TRACE("layer " + std::to_string(i));
    expect_exact(s, workers);
  }
}

}  // namespace
}  // namespace harness

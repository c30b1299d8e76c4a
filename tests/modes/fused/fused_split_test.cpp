// SPDX-License-Identifier: Apache-2.0
// Overflow::split on CPU groups, with ranks as threads and as processes: results are those of a call without a capacity, and a
// call is carried out in passes only if a rank's rows exceed the capacity.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "harness/draw.hpp"
#include "harness/outcome.hpp"
#include "modes/fused/fused_calls.hpp"
#include "switchyard/trace.hpp"

namespace harness {
namespace {

using switchyard::ErrorCode;

/// The smallest capacity with which a call has at most `passes` passes.
int64_t capacity_for(const Scenario& s, int64_t passes) {
  return (s.config.max_tokens + passes - 1) / passes * s.world() * s.config.topk;
}
Scenario splitting(Scenario s, int64_t passes) {
  s.config.overflow = Overflow::split;
  s.config.capacity = std::max<int64_t>(1, capacity_for(s, passes));
  return s;
}

/// Maximum rows of a rank in a call.
int64_t max_rows(const Scenario& s, int call) {
  std::vector<int64_t> rows(idx(s.world()));
  for (int source = 0; source < s.world(); ++source)
    for (const int32_t id : ids_of(s, call, source))
      if (id >= 0) ++rows[idx(owner_of(s, id))];
  return *std::max_element(rows.begin(), rows.end());
}

class FusedSplits : public testing::TestWithParam<Where> {
 protected:
  static Scenario in_this_world() { return scenario(GetParam().world); }
  static void expect_exact(const Scenario& s, int calls = 4) { harness::expect_exact(s, GetParam().workers, calls); }
};

/// With one rank, all routes are its own, so every call with more rows than the capacity is split.
TEST_P(FusedSplits, HaveTheResultsOfOneCall) {
  for (const int64_t passes : {1, 2, 5}) {
    SCOPED_TRACE("passes " + std::to_string(passes));
    expect_exact(splitting(in_this_world(), passes));
  }
}

TEST_P(FusedSplits, AlternateWithCallsThatFit) {
  Scenario s = in_this_world();
  s.alternates = true;
  for (const int64_t passes : {2, 5}) {
    Scenario some = splitting(s, passes);
    for (const int call : {0, 2, 4}) some.config.capacity = std::max(some.config.capacity, max_rows(some, call));
    expect_exact(some, 6);
  }
}

TEST_P(FusedSplits, GiveOneExpertEverything) {
  Scenario s = in_this_world();
  s.one_expert = true;
  for (const int64_t passes : {2, 5, 64}) expect_exact(splitting(s, passes));
}

TEST_P(FusedSplits, TakeEveryOptionOfACall) {
  Scenario s = in_this_world();
  s.one_expert = s.add = s.stated = s.in_heap = true;
  expect_exact(splitting(s, 3));
  s.weighted = s.in_heap = false;
  expect_exact(splitting(s, 3));
}

TEST_P(FusedSplits, HaveRanksWithoutTokens) {
  Scenario s = in_this_world();
  s.one_expert = true;
  std::fill(s.tokens.begin() + 1, s.tokens.end(), 0);
  expect_exact(splitting(s, 4));
  s.tokens[0] = 0;
  expect_exact(splitting(s, 4));
  s.config.max_tokens = 0;
  expect_exact(splitting(s, 4));
}

INSTANTIATE_TEST_SUITE_P(Everywhere, FusedSplits, testing::ValuesIn(everywhere()), where_name);

/// How often rank 0 exchanged counts in a call with `s`, which must be exact.
size_t plans_of(const Scenario& s, int call) {
  const Workers workers{1, 2, false};
  const Fleet fleet = fleet_of(s.world(), workers, FusedMoe::heap_bytes(s.config, s.world()));
  switchyard::Trace trace(s.world(), {.num_blocks = 1, .num_warps = 2});
  const auto failures = run_threads(fleet, [&](Group& group, Failures& f) {
    Caller caller(group, s);
    group.set_trace(&trace);
    caller.call(call, f);
    group.set_trace(nullptr);
    group.barrier();
  });
  EXPECT_EQ(joined(failures), "");
  const auto slices = trace.slices();
  return static_cast<size_t>(
      std::count_if(slices.begin(), slices.end(), [](const auto& e) { return e.rank == 0 && e.name == "exchange_counts"; }));
}

/// A call that fits has one plan. Otherwise, another one for each pass over tokens of any rank follows.
TEST(FusedSplit, BeginsOneRowAboveTheCapacity) {
  Scenario s = scenario(3);
  s.config.overflow = Overflow::split;
  const int64_t rows = max_rows(s, 0);
  s.config.capacity = rows;
  EXPECT_EQ(plans_of(s, 0), 1u);
  s.config.capacity = rows - 1;
  const int64_t in_pass = s.config.capacity / (3 * s.config.topk), passes = (s.config.max_tokens + in_pass - 1) / in_pass,
                each = (s.config.max_tokens + passes - 1) / passes, max = *std::max_element(s.tokens.begin(), s.tokens.end());
  ASSERT_GE(passes, 2);
  EXPECT_EQ(plans_of(s, 0), idx(1 + (max + each - 1) / each));
  s.tokens = {static_cast<int64_t>(1), each, 0};  // few tokens, of which no rank gets too many rows
  EXPECT_EQ(plans_of(s, 0), 1u);
  s.config.capacity = 0;
  EXPECT_EQ(plans_of(s, 0), 1u);
}

/// The statistics of a call count all its passes, and its invalid ids are counted once.
TEST(FusedSplit, CountsWhatOneCallCounts) {
  Scenario s = scenario(3), split = s;
  s.alternates = split.alternates = true;
  split = splitting(split, 4);
  s.config.invalid_ids = split.config.invalid_ids = switchyard::InvalidIds::count;
  const Fleet fleet = fleet_of(3, {1, 2, false}, 2 * FusedMoe::heap_bytes(s.config, 3));
  const auto failures = run_ranks(ranks_of_suite(), fleet, [&](Group& group, Failures& f) {
    Caller whole(group, s), parts(group, split);
    for (int call = 0; call < 4; ++call) {
      whole.call(call, f);
      parts.call(call, f);
      const auto expected = whole.layer().last_call(), got = parts.layer().last_call();
      f.equal(expected.remote_bytes, got.remote_bytes, "remote_bytes");
      f.equal(expected.local_bytes, got.local_bytes, "local_bytes");
      f.equal(expected.payload_rows, got.payload_rows, "payload_rows");
      f.check(got.plan_us > 0 && got.total_us >= got.plan_us, "times");
    }
    const int64_t tokens = s.config.max_tokens;
    std::vector<int32_t> ids(idx(tokens * s.config.topk), s.config.num_experts - 1);
    ids[0] = ids.back() = -7;
    const std::vector<uint16_t> x(idx(tokens * s.config.hidden));
    std::vector<uint16_t> out(x.size(), 7);
    parts.layer().forward(x.data(), ExpertIds::of(ids.data(), tokens, s.config.topk), nullptr, out.data());
    f.equal(int64_t{2}, parts.layer().invalid_ids(), "invalid ids");
    f.check(out == x, "tokens of zeros have other results than zeros");
  });
  EXPECT_EQ(joined(failures), "");
}

TEST(FusedSplit, IsForWholeCallsOnly) {
  std::vector<Group> groups = Group::in_process(1);
  FusedMoeConfig config = FusedMoeRig::config();
  config.overflow = Overflow::split;
  FusedMoeRig rig(groups[0], config);
  rig.round();
  expect_text(outcome_of([&] { rig.layer.dispatch_up(rig.rows.data(), rig.expert_ids(), nullptr); }), ErrorCode::unsupported,
              "overflow = split: the halves of a layer need all rows at once: use fail or drop_and_report");
}

TEST(FusedSplit, NeedsRoomForSixtyFourPasses) {
  FusedMoeConfig config = FusedMoeRig::config();
  config.overflow = Overflow::split;
  config.max_tokens = 640;
  config.capacity = 10 * 3 * config.topk;
  EXPECT_GT(FusedMoe::heap_bytes(config, 3), 0u);
  config.capacity -= 1;
  expect_text(outcome_of([&] { (void)FusedMoe::heap_bytes(config, 3); }), ErrorCode::invalid_argument,
              "MoeLayerConfig::capacity = 59: must be 0 or at least 60 for overflow split");
}

TEST(FusedSplit, ConstructorsRefuseLessThanOneTokenPerPass) {
  std::vector<Group> groups = Group::in_process(1);
  FusedMoeConfig config = FusedMoeRig::config();
  config.overflow = Overflow::split;
  config.capacity = config.topk - 1;
  expect_text(outcome_of([&] { FusedMoeRig rig(groups[0], config); }), ErrorCode::invalid_argument,
              "MoeLayerConfig::capacity = " + std::to_string(config.capacity) + ": must be 0 or at least ");
}

/// SWITCHYARD_RANDOM_LAYERS: the number of layers (default: 30).
TEST(FusedSplit, AtRandom) {
  const uint64_t layers = from_environment("SWITCHYARD_RANDOM_LAYERS", 30);
  for (uint64_t i = 0; i < layers && !HasFailure(); ++i) {
    Draw draw(i + 900);
    Scenario s = scenario_at_random(draw);
    s.one_expert = draw.one_in(4);
    s.alternates = draw.one_in(3);
    s = splitting(s, draw.between(1, 9));
    const Workers workers = workers_at_random(draw);
    SCOPED_TRACE("layer " + std::to_string(i));
    expect_exact(s, workers);
  }
}

}  // namespace
}  // namespace harness

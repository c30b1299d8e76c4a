// SPDX-License-Identifier: Apache-2.0
// Faults specific to low-latency mode: incorrectly used outputs and different calls. fault_stories_test.cpp covers the faults
// common to all modes (case C12).
#include <gtest/gtest.h>

#include <algorithm>

#include "modes/low_latency/low_latency_rig.hpp"
#include "protocol/low_latency/call.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::CombineOrder;
using switchyard::DType;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::LowLatencyConfig;
using switchyard::LowLatencyExchange;
using switchyard::ScaleKind;

TEST(Misuse, Fp8RowsWithoutScalesInTheConfig) {
  const auto all = outcomes(1, options_with(60s), [&](Group& group) {
    auto config = LowLatencyRig::config();
    config.scales = ScaleKind::none;
    LowLatencyRig rig(group, config);
    auto x = rig.x();
    x.dtype = DType::fp8_e4m3;
    x.scales = x.data;
    x.scale_kind = ScaleKind::f32;
    rig.exchange.dispatch(x, rig.expert_ids(), rig.output);
  });
  EXPECT_EQ(code_name(all[0].code), "invalid_argument");
  EXPECT_NE(all[0].text.find("x.dtype = fp8_e4m3"), std::string::npos) << all[0].text;
}

TEST(Misuse, OutputsOfOtherObjectsAndRanks) {
  std::vector<switchyard::LowLatencyOutput> outputs(2);
  auto all = outcomes(2, options_with(60s), [&](Group& group) {
    auto config = LowLatencyRig::config();
    LowLatencyRig rig(group);
    config.max_tokens = 5;
    LowLatencyExchange other(group, config);
    if (group.rank() == 0) rig.output = other.make_output();
    rig.dispatch();
  });
  EXPECT_EQ(code_name(all[0].code), "invalid_argument");
  EXPECT_NE(all[0].text.find("with another one"), std::string::npos) << all[0].text;
  EXPECT_EQ(code_name(all[1].code), "peer_failed");
  all = outcomes(2, options_with(60s), [&](Group& group) {
    LowLatencyRig rig(group);
    outputs[static_cast<size_t>(group.rank())] = rig.output;
    group.barrier();
    if (group.rank() == 0) rig.output = outputs[1];
    rig.dispatch();
  });
  EXPECT_NE(all[0].text.find("rank 1 of 2"), std::string::npos) << all[0].text;
  EXPECT_EQ(all[1].failed_rank, 0);
}

// --- Different calls

TEST(LowLatencyMismatch, OfCallsOrdersAndTypes) {
  using Spoil = std::function<void(LowLatencyRig&)>;
  const Spoil spoils[] = {[](LowLatencyRig& rig) { rig.dispatch(); }, [](LowLatencyRig& rig) { rig.dispatch_send()(); },
                          [](LowLatencyRig& rig) { rig.combine(CombineOrder::per_rank); },
                          [](LowLatencyRig& rig) {
                            auto y = rig.y();
                            y.dtype = DType::f16;
                            rig.exchange.combine(y, rig.output, rig.out.data());
                          }};
  for (const Spoil& spoil : spoils) {
    expect_mismatch(outcomes(3, options_with(60s), [&](Group& group) {
      LowLatencyRig rig(group);
      rig.dispatch();
      group.rank() == 2 ? spoil(rig) : rig.combine();
    }));
  }
}

/// A rig with a second output: call 1 fills the rig's output, and call 2 fills b.
struct TwoOutputs {
  explicit TwoOutputs(Group& group, uint64_t first_epoch = 1)
      : rig(numbered(group, first_epoch)), b(rig.exchange.make_output()) {
    rig.dispatch();
    fill_b();
  }
  static Group& numbered(Group& group, uint64_t first_epoch) {
    switchyard::detail::number_calls_from(group, first_epoch);
    return group;
  }
  /// Uses weights half as large, so that the sums differ.
  void fill_b() {
    const std::vector<float> quarters(rig.weights.size(), 0.25f);
    const int32_t tokens = LowLatencyRig::kTokens;
    switchyard::LowLatencyDispatchOptions o;
    o.topk_weights = quarters.data();
    o.device_tokens = &tokens;
    rig.exchange.dispatch(rig.x(), rig.expert_ids(), b, o);
  }
  /// All experts return ones. \returns true if every sum is `weight` for each of a token's two choices
  bool combine(const switchyard::LowLatencyOutput& from, float weight, CombineOrder order, bool split = false) {
    std::fill(rig.out.begin(), rig.out.end(), uint16_t{0xFFFF});
    if (split)
      rig.exchange.combine_send(rig.y(), from, rig.out.data(), {order})();
    else
      rig.exchange.combine(rig.y(), from, rig.out.data(), {order});
    const uint16_t sum = weight == 0.5f ? 0x3F80 : 0x3F00;
    return std::all_of(rig.out.begin(), rig.out.end(), [sum](uint16_t y) { return y == sum; });
  }
  void combine_own(CombineOrder order, bool split = false) { (void)combine(rig.output, 0.5f, order, split); }
  void combine_b(CombineOrder order, bool split = false) { (void)combine(b, 0.25f, order, split); }

  LowLatencyRig rig;
  switchyard::LowLatencyOutput b;
};

constexpr uint64_t kEpochsOfDetail = uint64_t{1} << switchyard::detail::kHeaderDetailBits;

/// One rank combines the rows of a different dispatch.
TEST(LowLatencyMismatch, OfOutputsOfOtherDispatches) {
  using Use = std::function<void(TwoOutputs&)>;
  struct Case {
    Use others, one;
  };
  const Case cases[] = {
      {[](TwoOutputs& t) { t.combine_own(CombineOrder::per_route); },
       [](TwoOutputs& t) { t.combine_b(CombineOrder::per_route); }},
      {[](TwoOutputs& t) { t.combine_b(CombineOrder::per_rank); },
       [](TwoOutputs& t) { t.combine_own(CombineOrder::per_rank); }},
      {[](TwoOutputs& t) { t.combine_b(CombineOrder::per_route, true); },
       [](TwoOutputs& t) { t.combine_own(CombineOrder::per_route); }},
      {[](TwoOutputs& t) { t.combine_own(CombineOrder::per_route); },
       [](TwoOutputs& t) { t.combine_b(CombineOrder::per_route, true); }},
      {[](TwoOutputs& t) {
         t.rig.dispatch();
         t.combine_own(CombineOrder::per_route);
       },
       [](TwoOutputs& t) {  // an output that the last dispatch did not fill on this rank
         t.fill_b();
         t.combine_own(CombineOrder::per_route);
       }},
  };
  for (const int world : {2, 3, 5}) {
    for (const uint64_t first_epoch : {uint64_t{1}, kEpochsOfDetail - 1, (uint64_t{1} << 40) - 2}) {
      for (const Case& c : cases) {
        expect_mismatch(outcomes(world, options_with(60s), [&](Group& group) {
          TwoOutputs outputs(group, first_epoch);
          group.rank() == world / 2 ? c.one(outputs) : c.others(outputs);
        }));
      }
    }
  }
}

/// Outputs that exist at the same time may be combined in any order and repeatedly. Only the dispatch must match: each rank
/// chooses which of its outputs the dispatch fills.
TEST(LowLatencyMismatch, NotOfOutputsInAnyOrder) {
  for (const uint64_t first_epoch : {uint64_t{1}, kEpochsOfDetail - 4, (uint64_t{1} << 40) - 4}) {
    const auto all = outcomes(3, options_with(60s), [&](Group& group) {
      TwoOutputs t(group, first_epoch);
      const auto& own = t.rig.output;
      for (const CombineOrder order : {CombineOrder::per_route, CombineOrder::per_rank}) {
        EXPECT_TRUE(t.combine(t.b, 0.25f, order));
        EXPECT_TRUE(t.combine(own, 0.5f, order, true));
        EXPECT_TRUE(t.combine(own, 0.5f, order));
        EXPECT_TRUE(t.combine(t.b, 0.25f, order, group.rank() == 1));
      }
      if (group.rank() == 1) t.rig.exchange.dispatch(t.rig.x(), t.rig.expert_ids(), t.b, t.rig.options());
      if (group.rank() != 1) t.rig.dispatch();
      EXPECT_TRUE(t.combine(group.rank() == 1 ? t.b : own, 0.5f, CombineOrder::per_route));
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
}

}  // namespace
}  // namespace harness

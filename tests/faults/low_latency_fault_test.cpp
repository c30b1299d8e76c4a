// SPDX-License-Identifier: Apache-2.0
// Faults of low-latency mode: wrong arguments, different calls, ranks that never come or die. Deadlines are long where a peer
// must be told at once and short where time must run out (case C12).
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "faults/low_latency_misuses.hpp"
#include "protocol/low_latency_call.hpp"
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

// --- Misuse on one rank

class LowLatencyMisuseOnOneRank : public testing::TestWithParam<LowLatencyMisuse> {};

TEST_P(LowLatencyMisuseOnOneRank, ThrowsThereAndEndsThePeers) {
  const LowLatencyMisuse& m = GetParam();
  constexpr int kBad = 1;
  const auto all = outcomes(3, options_with(60s), [&](Group& group) {
    LowLatencyRig rig(group);
    m.body(rig, group.rank() == kBad);
  });
  EXPECT_EQ(code_name(all[kBad].code), code_name(m.code)) << all[kBad].text;
  EXPECT_NE(all[kBad].text.find(m.in_text), std::string::npos) << all[kBad].text;
  for (const size_t r : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(code_name(all[r].code), "peer_failed") << all[r].text;
    EXPECT_EQ(all[r].failed_rank, kBad);
    EXPECT_EQ(code_name(all[r].reason), code_name(m.code)) << all[r].text;
  }
}

const auto name_of_misuse = [](const auto& m) { return std::string(m.param.name); };
INSTANTIATE_TEST_SUITE_P(Dispatch, LowLatencyMisuseOnOneRank, testing::ValuesIn(dispatch_misuses()), name_of_misuse);
INSTANTIATE_TEST_SUITE_P(Combine, LowLatencyMisuseOnOneRank, testing::ValuesIn(combine_misuses()), name_of_misuse);

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

TEST(Misuse, ConfigurationsNameTheField) {
  using Spoil = std::function<void(LowLatencyConfig&)>;
  const std::pair<const char*, Spoil> spoils[] = {
      {"hidden = 0", [](LowLatencyConfig& c) { c.hidden = 0; }},
      {"hidden = 1048577", [](LowLatencyConfig& c) { c.hidden = (1 << 20) + 1; }},
      {"multiple of 16", [](LowLatencyConfig& c) { c.hidden = 4; }},
      {"rows as they are sent", [](LowLatencyConfig& c) { c.hidden = 24; }},
      {"num_experts = 0", [](LowLatencyConfig& c) { c.num_experts = 0; }},
      {"topk = 0", [](LowLatencyConfig& c) { c.topk = 0; }},
      {"topk = 33", [](LowLatencyConfig& c) { c.topk = 33; }},
      {"max_tokens = 0", [](LowLatencyConfig& c) { c.max_tokens = 0; }},
      {"max_tokens = 65536", [](LowLatencyConfig& c) { c.max_tokens = 65536; }},
      {"row_type = fp8_e4m3", [](LowLatencyConfig& c) { c.row_type = DType::fp8_e4m3; }},
      {"scales = 3", [](LowLatencyConfig& c) { c.scales = static_cast<ScaleKind>(3); }},
      {"scale_group = 96", [](LowLatencyConfig& c) { c.scale_group = 96; }},
      {"scale_order = 2", [](LowLatencyConfig& c) { c.scale_order = static_cast<switchyard::ScaleOrder>(2); }},
      {"sending = 2", [](LowLatencyConfig& c) { c.sending = static_cast<switchyard::Sending>(2); }},
      {"pieces = -1", [](LowLatencyConfig& c) { c.pieces = -1; }},
      {"pieces = 17", [](LowLatencyConfig& c) { c.pieces = 17; }},
      {"rows of an output", [](LowLatencyConfig& c) {
         c.num_experts = 1 << 20;
         c.max_tokens = 65535;
       }}};
  for (const auto& [text, spoil] : spoils) {
    LowLatencyConfig config = LowLatencyRig::config();
    spoil(config);
    const Outcome o = outcome_of([&] { (void)LowLatencyExchange::memory_required(config, 2); });
    EXPECT_EQ(code_name(o.code), "invalid_argument") << text;
    EXPECT_NE(o.text.find(text), std::string::npos) << o.text;
    const auto all = outcomes(2, options_with(60s), [&](Group& group) { LowLatencyExchange exchange(group, config); });
    for (const Outcome& end : all) EXPECT_EQ(code_name(end.code), "invalid_argument") << end.text;
  }
  EXPECT_EQ(code_name(outcome_of([] { (void)LowLatencyExchange::memory_required(LowLatencyRig::config(), 65); }).code),
            "invalid_argument");
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

/// A rig with a second output: the rig's is filled by call 1, b by call 2.
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
  /// With half the weights, so that its sums differ.
  void fill_b() {
    const std::vector<float> quarters(rig.weights.size(), 0.25f);
    const int32_t tokens = LowLatencyRig::kTokens;
    switchyard::LowLatencyDispatchOptions o;
    o.weights = quarters.data();
    o.device_tokens = &tokens;
    rig.exchange.dispatch(rig.x(), rig.expert_ids(), b, o);
  }
  /// Ones from all experts. \returns true if every sum is `weight` for each of a token's two choices
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

/// One rank sums the rows of another dispatch than the others do.
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
       [](TwoOutputs& t) {  // the same output, which the last dispatch did not fill here
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

/// Outputs that are alive at the same time are combined in any order, also more than once. What counts is the dispatch: which
/// output it fills is each rank's own affair.
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

TEST(LowLatencyMismatch, OfConfigurations) {
  using Spoil = std::function<void(LowLatencyConfig&)>;
  const Spoil spoils[] = {
      [](LowLatencyConfig& c) { c.hidden = 128; },
      [](LowLatencyConfig& c) { c.num_experts = 9; },
      [](LowLatencyConfig& c) { c.topk = 3; },
      [](LowLatencyConfig& c) { c.max_tokens = 7; },
      [](LowLatencyConfig& c) { c.row_type = DType::f16; },
      [](LowLatencyConfig& c) { c.scales = ScaleKind::ue8m0; },
      [](LowLatencyConfig& c) { c.scale_group = 32; },
      [](LowLatencyConfig& c) { c.scale_order = switchyard::ScaleOrder::column_major; },
      [](LowLatencyConfig& c) { c.sending = switchyard::Sending::per_route; },
      [](LowLatencyConfig& c) { c.pieces = 2; },
  };
  for (const Spoil& spoil : spoils) {
    const auto all = outcomes(3, options_with(60s), [&](Group& group) {
      LowLatencyConfig config = LowLatencyRig::config();
      if (group.rank() == 1) spoil(config);
      LowLatencyExchange exchange(group, config);
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "mismatch") << o.text;
  }
}

// --- Ranks that never come, or die (C12)

struct LowLatencySilence {
  const char* name;
  const char* operation;
  uint64_t call;
  std::function<void(LowLatencyRig&, bool silent)> body;  ///< the silent rank leaves out the last call
};
std::ostream& operator<<(std::ostream& out, const LowLatencySilence& s) { return out << s.name; }

std::vector<LowLatencySilence> silences() {
  const auto unless = [](auto call) {
    return [call](LowLatencyRig& rig, bool silent) {
      if (!silent) call(rig);
    };
  };
  return {{"first_dispatch", "dispatch", 1, unless([](LowLatencyRig& rig) { rig.dispatch(); })},
          {"receiving_half", "dispatch", 1, unless([](LowLatencyRig& rig) { rig.dispatch_send()(); })},
          {"third_call", "dispatch", 3,
           [](LowLatencyRig& rig, bool silent) {
             rig.round();
             if (!silent) rig.dispatch();
           }},
          {"combine", "combine", 2,
           [](LowLatencyRig& rig, bool silent) {
             rig.dispatch();
             if (!silent) rig.combine();
           }},
          {"combine_by_rank", "combine", 2, [](LowLatencyRig& rig, bool silent) {
             rig.dispatch();
             if (!silent) rig.combine(CombineOrder::per_rank);
           }}};
}

class LowLatencySilentRank : public testing::TestWithParam<LowLatencySilence> {};

TEST_P(LowLatencySilentRank, OthersReportItInFull) {
  const LowLatencySilence& s = GetParam();
  for (const int world : {2, 4, 8}) {
    const int silent = world - 1;
    const auto all = outcomes(world, options_with(kSoon), [&](Group& group) {
      switchyard::detail::number_calls_from(group, uint64_t{1} << 40);  // the number in the report is that of the call
      LowLatencyRig rig(group);
      s.body(rig, group.rank() == silent);
      while (group.rank() == silent && outcome_of([&] { group.check(); }).code == ErrorCode::ok)
        std::this_thread::sleep_for(1ms);  // there, but not calling
    });
    for (int r = 0; r < world; ++r) {
      const Outcome& o = all[static_cast<size_t>(r)];
      if (r == silent) continue;
      EXPECT_EQ(code_name(o.code), "peer_timeout") << o.text;
      EXPECT_STREQ(o.report.operation, s.operation);
      EXPECT_STREQ(o.report.site, "call_header");
      EXPECT_EQ(o.report.call, s.call);
      EXPECT_EQ(o.report.waiting_rank, r);
      EXPECT_EQ(o.report.awaited_rank, silent);
      EXPECT_NE(o.text.find("rank " + std::to_string(silent)), std::string::npos) << o.text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(C12, LowLatencySilentRank, testing::ValuesIn(silences()),
                         [](const auto& s) { return std::string(s.param.name); });

/// A thousand calls after a fault cost one deadline.
TEST(LowLatencyFaults, AreSticky) {
  const auto all = outcomes(2, options_with(kSoon), [&](Group& group) {
    LowLatencyRig rig(group);
    if (group.rank() == 1) return;
    const auto receive = rig.dispatch_send();
    EXPECT_EQ(code_name(outcome_of([&] { receive(); }).code), "peer_timeout");
    for (int i = 0; i < 1000; ++i) EXPECT_EQ(code_name(outcome_of([&] { rig.dispatch(); }).code), "peer_failed");
    EXPECT_EQ(code_name(outcome_of([&] { LowLatencyRig again(group); }).code), "peer_failed");
  });
  EXPECT_EQ(code_name(all[0].code), "ok") << all[0].text;
}

TEST(LowLatencyFaults, AbortEndsAWaitAndNamesTheRank) {
  const auto all = outcomes(3, options_with(60s), [&](Group& group) {
    LowLatencyRig rig(group);
    rig.dispatch();
    if (group.rank() == 2) return group.abort(static_cast<int32_t>(ErrorCode::io));
    rig.combine();
  });
  for (const size_t r : {size_t{0}, size_t{1}}) {
    EXPECT_EQ(code_name(all[r].code), "peer_failed") << all[r].text;
    EXPECT_EQ(all[r].failed_rank, 2);
  }
}

TEST(LowLatencyFaults, WaitStatisticsNameTheSlowRank) {
  const auto all = outcomes(3, options_with(60s), [&](Group& group) {
    LowLatencyRig rig(group);
    rig.round();
    group.barrier();
    const auto before = group.wait_statistics();
    if (group.rank() == 1) std::this_thread::sleep_for(300ms);
    rig.round();
    const auto after = group.wait_statistics();
    if (group.rank() == 1) return;
    EXPECT_GT(after[1].waits, before[1].waits);
    for (size_t r = 0; r < 3; ++r) EXPECT_GE(after[1].total_ms - before[1].total_ms, after[r].total_ms - before[r].total_ms);
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

TEST(LowLatencyFaults, HeapTooSmall) {
  auto config = LowLatencyRig::config();
  config.max_tokens = 4096;
  const auto all = outcomes(2, options_with(60s, size_t{1} << 20), [&](Group& group) { LowLatencyExchange e(group, config); });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "heap_exhausted") << o.text;
}

#if !defined(__SANITIZE_THREAD__)
TEST(LowLatencyFaults, ADeadProcessIsNamed) {
  Fleet fleet;
  fleet.world = 3;
  fleet.options = options_with(60s);
  const auto failures = run_processes(
      fleet,
      [](Group& group, Failures& f) {
        LowLatencyRig rig(group);
        const Outcome o = outcome_of([&] {
          rig.round();
          rig.dispatch();
          if (group.rank() == 1) ::raise(SIGKILL);  // the others may still be in that dispatch
          for (int i = 0; i < 4; ++i) rig.combine();
        });
        f.equal(std::string("peer_failed"), code_name(o.code), "code of " + o.text);
        f.equal(1, o.failed_rank, "failed rank");
      },
      2);
  EXPECT_EQ(joined(failures), "");
}
#endif

}  // namespace
}  // namespace harness

// SPDX-License-Identifier: Apache-2.0
// Low-latency objects: split calls and their hooks, other calls between the halves, and memory.
#include <gtest/gtest.h>

#include <barrier>
#include <cstring>

#include "harness/fleet.hpp"
#include "modes/low_latency/low_latency_rig.hpp"
#include "modes/low_latency/low_latency_script.hpp"
#include "modes/normal/normal_rig.hpp"
#include "protocol/low_latency/messages.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::Group;
using switchyard::LowLatencyExchange;

void expect_all_ok(const std::vector<Outcome>& all) {
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

// --- Split calls

LowLatencyScript split_script(int world, uint64_t seed) {
  LowLatencyScript s;
  s.name = "split " + std::to_string(seed);
  s.world = world;
  s.seed = seed;
  s.config.hidden = 80;
  s.config.num_experts = 7;
  s.config.topk = 3;
  s.config.max_tokens = 5;
  s.outputs = 2;
  for (const int output : {0, 1, 0}) {
    auto& step = s.dispatch({5, 0, 3}, output == 0 ? Routing::uniform : Routing::duplicates);
    step.output = output;
    step.x_pattern = Pattern::random_values;
  }
  s.combine(CombineOrder::per_rank, 1);
  s.combine(CombineOrder::per_route, 0);
  for (auto& step : s.steps) step.split = true;
  s.repeats = 3;
  return s;
}

/// Whole and split calls on other objects and in another mode, and a barrier, run while messages of this object are in flight.
TEST(SplitCalls, OtherCallsBetweenTheHalves) {
  constexpr int kWorld = 3;
  const auto outer = make_low_latency_case(split_script(kWorld, 1)), inner = make_low_latency_case(split_script(kWorld, 2));
  for (const bool deferred : {false, true}) {
    Fleet fleet;
    fleet.world = kWorld;
    fleet.options = options_with(60s);
    fleet.deferred = deferred;
    const auto failures = run_threads(fleet, [&](Group& group, Failures& f) {
      LowLatencyExchange a(group, outer->script.counting()), b(group, inner->script.counting());
      NormalRig normal(group);
      int turn = 0;
      run_on(group, a, *outer, f, [&] {
        if (turn++ % 5 == 0) run_on(group, b, *inner, f, [&] { group.barrier(); });
        normal.round();
        f.set_context("after calls of others");
      });
    });
    EXPECT_EQ(joined(failures), "");
  }
}

/// A rank may send before its peers have entered the call, and may postpone its own second half while they complete theirs.
TEST(SplitCalls, WaitForNobodyAndHoldNobodyUp) {
  std::barrier<> meet(2);  // not the group's barrier: all ranks would have to make the group's calls in the same order
  expect_all_ok(outcomes(2, options_with(60s), [&](Group& group) {
    LowLatencyRig rig(group);
    for (int i = 0; i < 3; ++i) {
      if (group.rank() == 0) {
        const auto receive = rig.dispatch_send();
        meet.arrive_and_wait();  // the other rank has not called yet
        meet.arrive_and_wait();  // it has returned from its call
        receive();
      } else {
        meet.arrive_and_wait();
        rig.dispatch();
        meet.arrive_and_wait();
      }
      if (group.rank() == 1) {
        const auto receive = rig.combine_send();
        meet.arrive_and_wait();
        meet.arrive_and_wait();
        receive();
      } else {
        meet.arrive_and_wait();
        rig.combine();
        meet.arrive_and_wait();
      }
      EXPECT_EQ(rig.out[0], 0x3F80);  // 0.5 * 1 + 0.5 * 1
    }
  }));
}

TEST(SplitCalls, SurviveAMoveOfTheObject) {
  expect_all_ok(outcomes(2, options_with(60s), [&](Group& group) {
    LowLatencyRig rig(group);
    const auto receive = rig.dispatch_send();
    LowLatencyExchange moved = std::move(rig.exchange);
    receive();
    moved.combine(rig.y(), rig.output, rig.out.data());
    EXPECT_EQ(rig.out[0], 0x3F80);
    EXPECT_EQ(moved.config().hidden, LowLatencyRig::kHidden);
  }));
}

/// AddressSanitizer reports memory that is freed between the halves.
TEST(SplitCalls, KeepTheMemoryOfTheirOutput) {
  expect_all_ok(outcomes(2, options_with(60s), [&](Group& group) {
    LowLatencyRig rig(group);
    const auto dispatched = rig.dispatch_send();
    rig.output = rig.exchange.make_output();
    dispatched();
    rig.dispatch();
    const auto combined = rig.combine_send();
    rig.output = {};
    combined();
    EXPECT_EQ(rig.out[0], 0x3F80);
  }));
}

TEST(SplitCalls, KeepTheirOutputFromOtherObjects) {
  const auto all = outcomes(1, options_with(60s), [&](Group& group) {
    LowLatencyRig rig(group), other(group);
    rig.dispatch();
    const auto receive = rig.combine_send();
    other.exchange.dispatch(other.x(), other.expert_ids(), rig.output, other.options());
  });
  EXPECT_EQ(code_name(all[0].code), "invalid_argument");
  EXPECT_NE(all[0].text.find("call its hook first"), std::string::npos) << all[0].text;
}

struct HookMisuse {
  const char* name;
  const char* in_text;
  std::function<void(LowLatencyRig&)> body;
};

TEST(SplitCalls, MisuseIsRefusedAndPeersAreTold) {
  const HookMisuse misuses[] = {
      {"dispatch between", "call its hook first",
       [](LowLatencyRig& rig) {
         const auto receive = rig.dispatch_send();
         rig.dispatch();
       }},
      {"combine between", "the dispatch sent before has not been received",
       [](LowLatencyRig& rig) {
         const auto receive = rig.dispatch_send();
         rig.combine();
       }},
      {"send between", "the combine sent before has not been received",
       [](LowLatencyRig& rig) {
         rig.dispatch();
         const auto receive = rig.combine_send();
         (void)rig.dispatch_send();
       }},
      {"twice", "received already",
       [](LowLatencyRig& rig) {
         const auto receive = rig.dispatch_send();
         receive();
         receive();
       }},
      {"an old hook", "received already",
       [](LowLatencyRig& rig) {
         const auto old = rig.dispatch_send();
         old();
         const auto receive = rig.combine_send();
         old();
       }},
  };
  for (const HookMisuse& m : misuses) {
    const auto all = outcomes(2, options_with(60s), [&](Group& group) {
      LowLatencyRig rig(group);
      if (group.rank() == 1) m.body(rig);
      for (int i = 0; i < 3; ++i) rig.round();
    });
    EXPECT_EQ(code_name(all[1].code), "invalid_argument") << m.name << ": " << all[1].text;
    EXPECT_NE(all[1].text.find(m.in_text), std::string::npos) << m.name << ": " << all[1].text;
    EXPECT_EQ(code_name(all[0].code), "peer_failed") << m.name << ": " << all[0].text;
    EXPECT_EQ(all[0].failed_rank, 1);
    EXPECT_EQ(code_name(all[0].reason), "invalid_argument");
  }
}

// --- Memory

size_t round_up_to(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Formula of docs/concepts/low_latency.md, "Memory".
size_t bytes_by_formula(const LowLatencyConfig& c, size_t world) {
  const auto hidden = static_cast<size_t>(c.hidden), topk = static_cast<size_t>(c.topk);
  const auto tokens = static_cast<size_t>(c.max_tokens), group = static_cast<size_t>(c.scale_group);
  const size_t groups = (hidden + group - 1) / group;
  const bool fp8 = c.scales != ScaleKind::none;
  const size_t row = switchyard::dtype_bytes(c.dtype, static_cast<int64_t>(hidden)), payload = fp8 ? hidden : row;
  const size_t scales = !fp8 ? 0 : c.scales == ScaleKind::f32 ? 4 * groups : groups;
  const size_t entries = c.sending == Sending::per_rank ? topk : 1, units = tokens * topk / entries;
  const size_t message = round_up_to(payload, 128) + round_up_to(scales, 128) + round_up_to(16 * entries, 128);
  const size_t slots = std::max(topk, world);
  const size_t experts = (static_cast<size_t>(c.num_experts) + world - 1) / world;
  const size_t words = 8 * world + experts * world + world * units;
  return round_up_to(16 * words, 4096) + 2 * (world * units * message + tokens * slots * round_up_to(row, 128));
}

TEST(Memory, FormulaAndBar) {
  LowLatencyConfig c;
  c.hidden = 7168;
  c.num_experts = 256;
  c.topk = 8;
  c.max_tokens = 128;
  const size_t total = LowLatencyExchange::memory_required(c, 8).total();
  EXPECT_EQ(total, bytes_by_formula(c, 8));
  EXPECT_EQ(total, 44'851'200u);  // the worked example of docs/concepts/low_latency.md
  EXPECT_LE(total, size_t{96} << 20);
  c.sending = Sending::per_route;
  EXPECT_EQ(LowLatencyExchange::memory_required(c, 8).total(), bytes_by_formula(c, 8));
  c.pieces = 8;
  EXPECT_EQ(LowLatencyExchange::memory_required(c, 8).total(), bytes_by_formula(c, 8));
  c.scales = ScaleKind::ue8m0;
  c.scale_group = 32;
  c.pieces = 16;
  EXPECT_EQ(LowLatencyExchange::memory_required(c, 5).total(), bytes_by_formula(c, 5));
  c.scales = ScaleKind::none;
  c.dtype = DType::f32;
  c.num_experts = 3;
  c.pieces = 3;
  EXPECT_EQ(LowLatencyExchange::memory_required(c, 64).total(), bytes_by_formula(c, 64));
}

/// A heap of exactly the computed size suffices and is free again after the object is destroyed.
TEST(Memory, IsTakenOnceAndGivenBack) {
  auto config = LowLatencyRig::config();
  expect_all_ok(outcomes(3, options_with(60s, LowLatencyExchange::heap_bytes(config, 3)), [&](Group& group) {
    const size_t before = group.heap_used();
    for (int i = 0; i < 3; ++i) {
      LowLatencyRig rig(group, config);
      const size_t with = group.heap_used();
      EXPECT_GE(with - before, LowLatencyExchange::memory_required(config, 3).total());
      rig.round();
      EXPECT_EQ(group.heap_used(), with);
    }
    EXPECT_EQ(group.heap_used(), before);
  }));
}

TEST(Memory, OfExpertsHasTheShapeOfTheOutput) {
  expect_all_ok(outcomes(3, options_with(60s), [&](Group& group) {
    LowLatencyRig rig(group);
    const switchyard::LowLatencyRows y = rig.exchange.make_rows(), shared = y;
    EXPECT_EQ(y.rows, rig.output.x.rows);
    EXPECT_EQ(y.cols, rig.output.x.cols);
    EXPECT_EQ(y.dtype, DType::bf16);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(y.data) % 256, 0u);
    EXPECT_EQ(shared.data, y.data);
    for (const auto& [type, text] : {std::pair{DType::f32, "dtype = f32: wider"}, {DType::fp8_e4m3, "dtype = fp8_e4m3"}}) {
      const Outcome refused = outcome_of([&, which = type] { (void)rig.exchange.make_rows(which); });
      EXPECT_NE(refused.text.find(text), std::string::npos) << refused.text;
    }
    rig.dispatch();  // the object still works after such an error
    std::memcpy(y.data, rig.y_memory.data(), static_cast<size_t>(y.rows * y.cols) * 2);
    rig.exchange.combine(y, rig.output, rig.out.data());
    EXPECT_EQ(rig.out[0], 0x3F80);
  }));
}

/// Invalid caller memory for an output causes an error that names the member, and nothing is changed.
TEST(Memory, OfTheCallerIsChecked) {
  expect_all_ok(outcomes(2, options_with(60s), [&](Group& group) {
    LowLatencyRig rig(group);
    const switchyard::LowLatencyRows caller_rows = rig.exchange.make_rows();
    const switchyard::Rows good{caller_rows.data,   rig.output.x.rows, rig.output.x.cols,
                                rig.output.x.dtype, nullptr,           rig.output.x.scale_kind};
    using Spoil = void (*)(switchyard::Rows&);
    const std::pair<Spoil, const char*> faults[] = {
        {[](switchyard::Rows& r) { ++r.rows; }, "memory.rows"},
        {[](switchyard::Rows& r) { r.cols = 1; }, "memory.cols"},
        {[](switchyard::Rows& r) { r.dtype = DType::f32; }, "memory.dtype"},
        {[](switchyard::Rows& r) { r.scale_kind = r.scale_kind == ScaleKind::none ? ScaleKind::f32 : ScaleKind::none; },
         "memory.scale_kind"},
        {[](switchyard::Rows& r) { r.data = nullptr; }, "memory.data"}};
    for (const auto& [spoil, text] : faults) {
      switchyard::Rows bad = good;
      spoil(bad);
      const Outcome refused = outcome_of([&] { (void)rig.exchange.make_output(bad); });
      EXPECT_EQ(code_name(refused.code), "invalid_argument");
      EXPECT_NE(refused.text.find(text), std::string::npos) << refused.text;
    }
    rig.round();
    EXPECT_EQ(rig.out[0], 0x3F80);
  }));
}

TEST(Memory, FlagsSurviveSleep) {
  expect_all_ok(outcomes(2, options_with(60s), [&](Group& group) {
    switchyard::detail::number_calls_from(group, 1000);  // flags that were reset to zero would never be reached
    LowLatencyRig rig(group);
    for (int i = 0; i < 3; ++i) {
      rig.round();
      rig.dispatch();
      group.sleep();
      EXPECT_EQ(code_name(outcome_of([&] { (void)rig.exchange.make_output(); }).code), "ok");
      group.wake();
      rig.combine();
      EXPECT_EQ(rig.out[0], 0x3F80);
    }
  }));
}

/// Data that was sent but not received also survives.
TEST(Memory, SentRowsSurviveSleep) {
  expect_all_ok(outcomes(2, options_with(5s), [&](Group& group) {
    LowLatencyRig rig(group);
    rig.dispatch();
    switchyard::ReceiveHook receive = rig.combine_send();
    group.sleep();
    group.wake();
    receive();
    EXPECT_EQ(rig.out[0], 0x3F80);
    rig.round();
    EXPECT_EQ(rig.out[0], 0x3F80);
  }));
}

// --- Counts of a call, and the assignment of senders

/// Tests any number of tokens, near the ends of words. Bits for other experts, and for tokens after the counted ones, are set.
TEST(LowLatencyCounting, TokensOfASet) {
  using switchyard::detail::TokenSets;
  constexpr int kTokens = 100;
  const int words = TokenSets::words_for(kTokens);
  ASSERT_EQ(words, 4);
  std::vector<uint32_t> sets(static_cast<size_t>(3 * words), ~0u);
  const auto chooses = [](int t) { return t % 3 == 1 || t == 31 || t == 32 || t == 63; };
  for (int t = 0; t < 32 * words; ++t)
    if (!chooses(t) && t < kTokens) sets[static_cast<size_t>(words + t / 32)] &= ~(1u << t % 32);
  TokenSets given;
  EXPECT_FALSE(given.ready());
  given.sets = sets.data();
  given.words = words;
  EXPECT_TRUE(given.ready());
  int want = 0;
  for (int n = 0; n <= kTokens; ++n) {
    EXPECT_EQ(given.count(1, n), want) << n;
    want += chooses(n) ? 1 : 0;
  }
}

/// Every warp is a helper or handles one part of one message, and each team's entries are sent exactly once.
TEST(LowLatencyCounting, WarpsOfABlock) {
  struct Warp {
    int index, warps;
    int warp() const { return index; }
    int warps_per_block() const { return warps; }
  };
  struct Params {
    int parts, teams;
  };
  for (int warps = 1; warps <= 16; ++warps) {
    for (int parts = 1; parts <= warps; ++parts) {
      const Params p{parts, switchyard::detail::sending_teams(warps, parts)};
      ASSERT_GE(p.teams, 1);
      ASSERT_LE(p.teams * parts, warps);
      if (parts > 1 && p.teams > 1) {
        ASSERT_LT(p.teams * parts, warps);
      }
      std::vector<int> rows(static_cast<size_t>(p.teams * parts)), entries(static_cast<size_t>(p.teams));
      for (int w = 0; w < warps; ++w) {
        const switchyard::detail::Sender me(Warp{w, warps}, p);
        EXPECT_EQ(me.helpers, warps - p.teams * parts);
        if (me.team < p.teams) ++rows[static_cast<size_t>(me.team * parts + me.part)];
        for (int team = me.entries_of; team < p.teams; team += me.entries_step) ++entries[static_cast<size_t>(team)];
        if (me.helpers > 0 && me.team < p.teams) {
          EXPECT_GE(me.entries_of, p.teams) << "helpers send entries";
        }
      }
      EXPECT_EQ(rows, std::vector<int>(rows.size(), 1)) << warps << " warps, " << parts << " parts";
      EXPECT_EQ(entries, std::vector<int>(entries.size(), 1)) << warps << " warps, " << parts << " parts";
    }
  }
}

}  // namespace
}  // namespace harness

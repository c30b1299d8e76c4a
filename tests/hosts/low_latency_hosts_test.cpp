// SPDX-License-Identifier: Apache-2.0
// Low-latency mode across hosts: its faults, calls in two halves, and cases that other suites do not cover. The suites in
// tests/modes/low_latency also run across hosts and check the results.
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "hosts/faults_between_hosts.hpp"
#include "switchyard/expert_map.hpp"
#include "switchyard/trace.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::CombineOrder;
using switchyard::Group;
using switchyard::GroupOptions;
using switchyard::LowLatencyExchange;

// --- A rank that does not make the call: a proxy for one rank, for three, and for none

class SilentInLowLatency : public testing::TestWithParam<WatchedCall> {};

TEST_P(SilentInLowLatency, IsNamedByAll) {
  for (const auto& [hosts, silent] : {std::pair{"a,b", 3}, {"a,a,a,b", 3}, {"a,a,a,b", 1}})
    expect_named_when_silent(GetParam(), hosts, silent);
}

std::vector<WatchedCall> some_calls() {
  std::vector<WatchedCall> calls = calls_of_low_latency_mode();
  std::erase_if(calls, [](const WatchedCall& c) {
    return c.name != "low_latency_first_dispatch" && c.name != "low_latency_combine_by_rank" && c.name != "low_latency_receive";
  });
  return calls;
}
INSTANTIATE_TEST_SUITE_P(Hosts, SilentInLowLatency, testing::ValuesIn(some_calls()),
                         [](const auto& c) { return std::string(c.param.name); });

// --- A process that is killed while rows are in flight

class KilledInLowLatency : public testing::TestWithParam<int> {};

TEST_P(KilledInLowLatency, IsNamedByAll) { expect_named_when_killed<LowLatencyRig>(GetParam()); }

#if !defined(__SANITIZE_THREAD__)  // it checks only one process
INSTANTIATE_TEST_SUITE_P(Hosts, KilledInLowLatency, testing::Range(0, 4));
#else
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KilledInLowLatency);
#endif

// --- Calls that differ

struct Pair {
  const char* name;
  void (*here)(LowLatencyRig&);   ///< on host 0
  void (*there)(LowLatencyRig&);  ///< on host 1
};

/// Different calls on one object are detected from the data that the ranks announce.
TEST(LowLatencyOverHosts, OtherCallsAreFound) {
  const Pair pairs[] = {
      {"kind", [](LowLatencyRig& rig) { rig.dispatch(); }, [](LowLatencyRig& rig) { rig.combine(); }},
      {"order", [](LowLatencyRig& rig) { rig.combine(CombineOrder::per_rank); }, [](LowLatencyRig& rig) { rig.combine(); }},
      {"halves", [](LowLatencyRig& rig) { rig.dispatch_send()(); }, [](LowLatencyRig& rig) { rig.combine_send()(); }},
  };
  for (const Pair& pair : pairs) {
    const auto all = outcomes(4, options_on("a,a,b,b", 600s), [&](Group& group) {
      LowLatencyRig rig(group);
      rig.dispatch();
      (group.host() == 0 ? pair.here : pair.there)(rig);
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "mismatch") << pair.name << ": " << o.text;
  }
}

/// Dispatches with and without a selector, whole and in halves; the ranks of the difference are on one host or on two.
TEST(LowLatencyOverHosts, SelectorsOfSomeRanksAreFound) {
  for (const bool split : {false, true})
    for (const uint32_t selecting : {0b1100u, 0b0111u, 0b0010u}) {
      const auto all = outcomes(4, options_on("a,a,b,b", 600s), [&](Group& group) {
        LowLatencyRig rig(group);
        const int experts = rig.exchange.config().num_experts;
        switchyard::SlotSelector selector(group, switchyard::home_map(experts, 4, experts / 4));
        auto o = rig.options();
        if (selecting >> group.rank() & 1) o.selector = &selector;
        if (split)
          rig.exchange.dispatch_send(rig.x(), rig.expert_ids(), rig.output, o)();
        else
          rig.exchange.dispatch(rig.x(), rig.expert_ids(), rig.output, o);
      });
      for (const Outcome& o : all)
        EXPECT_EQ(code_name(o.code), "mismatch") << selecting << (split ? ", split: " : ": ") << o.text;
    }
}

TEST(LowLatencyOverHosts, RowsOfOtherDispatchesAreFound) {
  expect_mismatch(outcomes(4, options_on("a,a,b,b", 600s), [&](Group& group) {
    LowLatencyRig rig(group);
    auto older = rig.exchange.make_output();
    rig.exchange.dispatch(rig.x(), rig.expert_ids(), older, rig.options());
    rig.dispatch();
    rig.exchange.combine(rig.y(), group.host() == 0 ? older : rig.output, rig.out.data());
  }));
}

// --- Calls in two halves

/// Some ranks, including proxies, receive before a call on another object, and others receive after it; data that has been sent
/// is forwarded when a rank makes another call.
TEST(LowLatencyOverHosts, ReceivingHalvesAnywhereBehindTheirSendingHalves) {
  expect_all_ok(outcomes(4, options_on("a,a,b,b", 60s), [&](Group& group) {
    LowLatencyRig first(group), second(group);
    for (uint32_t late = 0; late < 16; ++late) {
      const bool receives_late = (late >> group.rank() & 1) != 0;
      const auto pass = [&](const switchyard::ReceiveHook& receive) {
        if (!receives_late) receive();
        second.round();
        group.barrier();
        if (receives_late) receive();
      };
      std::memset(first.out.data(), 0, first.out.size() * 2);
      pass(first.dispatch_send());
      pass(first.combine_send());
      EXPECT_EQ(first.out, std::vector<uint16_t>(first.out.size(), 0x3F80)) << late;
    }
  }));
}

/// Two calls are in flight at the same time and are received in either order.
TEST(LowLatencyOverHosts, HalvesOfTwoObjectsOverlap) {
  expect_all_ok(outcomes(4, options_on("a,a,b,b", 60s), [&](Group& group) {
    LowLatencyRig first(group), second(group);
    for (uint32_t turned = 0; turned < 16; ++turned) {
      const auto pass = [&](const switchyard::ReceiveHook& one, const switchyard::ReceiveHook& other) {
        const bool turn = (turned >> group.rank() & 1) != 0;
        (turn ? other : one)();
        (turn ? one : other)();
      };
      {
        const auto one = first.dispatch_send();
        pass(one, second.dispatch_send());
      }
      const auto one = first.combine_send();
      pass(one, second.combine_send());
      for (LowLatencyRig* rig : {&first, &second}) {
        EXPECT_EQ(rig->out, std::vector<uint16_t>(rig->out.size(), 0x3F80)) << turned;
        std::memset(rig->out.data(), 0, rig->out.size() * 2);
      }
    }
  }));
}

/// The sending half of a call never waits, whatever the other ranks do. The rows exceed the capacity of the sockets.
TEST(LowLatencyOverHosts, SendingHalvesWaitForNobody) {
  switchyard::LowLatencyConfig c = LowLatencyRig::config();
  c.hidden = 1 << 18;
  c.scales = switchyard::ScaleKind::none;
  std::barrier meet(2);
  GroupOptions o = options_on("a,b", 60s);
  o.heap_bytes = LowLatencyExchange::heap_bytes(c, 2);
  expect_all_ok(outcomes(2, o, [&](Group& group) {
    switchyard::detail::cross_in_rounds_of(group, 1);
    LowLatencyExchange exchange(group, c);
    auto output = exchange.make_output();
    const SmallArguments given(group.rank());
    const std::vector<uint16_t> rows(static_cast<size_t>(SmallArguments::kTokens * c.hidden), 0x3F80);
    std::vector<uint16_t> out(rows.size());
    switchyard::ReceiveHook receive;
    for (const int turn : {0, 1}) {  // one after the other
      if (group.rank() == turn)
        receive = exchange.dispatch_send({rows.data(), SmallArguments::kTokens, c.hidden, switchyard::DType::bf16},
                                         given.expert_ids(), output);
      meet.arrive_and_wait();
    }
    receive();
    exchange.combine(output.x, output, out.data());
    EXPECT_EQ(out, std::vector<uint16_t>(out.size(), 0x4000));  // 1 * 1 + 1 * 1
  }));
}

/// Destroying an object whose sent call has not been received does not affect the next call.
TEST(LowLatencyOverHosts, ObjectsMayGoBetweenTheHalves) {
  expect_all_ok(outcomes(2, options_on("a,b", 60s), [&](Group& group) {
    LowLatencyRig other(group);
    {
      LowLatencyRig rig(group);
      (void)rig.dispatch_send();
    }
    other.round();
    EXPECT_EQ(other.out[0], 0x3F80);
  }));
}

// --- Operations that need one host

TEST(LowLatencyOverHosts, WholeExchangesAndOutputsOfOtherHostsAreRefused) {
  std::vector<switchyard::LowLatencyOutput> together(2);
  expect_all_ok(outcomes(2, options_on("a", 60s), [&](Group& group) {
    LowLatencyRig rig(group);
    rig.dispatch();
    together[static_cast<size_t>(group.rank())] = rig.output;
  }));
  expect_all_ok(outcomes(2, options_on("a,b", 60s), [&](Group& group) {
    LowLatencyRig rig(group);
    expect_text(outcome_of([&] { rig.exchange.moe_all_to_all(rig.x(), rig.expert_ids(), rig.out.data()); }),
                switchyard::ErrorCode::unsupported, "use dispatch and combine");
    rig.round();  // nothing has been changed
    EXPECT_EQ(rig.out[0], 0x3F80);
  }));
  const auto all = outcomes(2, options_on("a,b", 60s), [&](Group& group) {
    LowLatencyRig rig(group);
    rig.exchange.combine(rig.y(), together[static_cast<size_t>(group.rank())], rig.out.data());
  });
  for (const Outcome& o : all) EXPECT_NE(code_name(o.code), "ok");
  EXPECT_TRUE(all[0].text.find("dispatch again") != std::string::npos ||
              all[1].text.find("dispatch again") != std::string::npos)
      << all[0].text << all[1].text;
}

// --- Traces

TEST(LowLatencyOverHosts, TracesShowWhatCrosses) {
  GroupOptions o = options_on("a,a,b,b", 600s);
  switchyard::TraceOptions t;
  t.num_blocks = o.num_blocks;
  t.num_warps = o.num_warps;
  switchyard::Trace trace(4, t);
  expect_all_ok(outcomes(4, o, [&](Group& group) {
    group.set_trace(&trace);
    LowLatencyRig(group).round();
    group.set_trace(nullptr);
  }));
  std::set<std::string> names;
  for (const auto& phase : trace.summary()) names.insert(phase.name);
  for (const char* name : {"pack_rows", "wait_network", "forward_rows", "send_rows", "return_rows", "sum_returned"})
    EXPECT_TRUE(names.contains(name)) << name;
}

}  // namespace
}  // namespace harness

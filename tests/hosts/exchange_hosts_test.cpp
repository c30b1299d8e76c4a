// SPDX-License-Identifier: Apache-2.0
// Normal mode across hosts: its faults, and cases that other suites do not cover. The suites in tests/modes/normal also run
// across hosts and check the results.
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "hosts/faults_between_hosts.hpp"
#include "modes/normal/scenario.hpp"
#include "switchyard/trace.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using switchyard::Dispatched;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::GroupOptions;
using switchyard::NormalExchange;

std::vector<WatchedCall> direct_calls() {
  std::vector<WatchedCall> calls = calls_of_normal_mode();
  std::erase_if(calls, [](const WatchedCall& c) { return c.name.rfind("ring", 0) == 0; });
  return calls;
}

// --- A rank that does not make the call: on the same host, on another one, or a proxy for others

class SilentOverHosts : public testing::TestWithParam<WatchedCall> {};

TEST_P(SilentOverHosts, IsNamedByAll) {
  // The silent rank is the last rank of a host, a proxy for two or three ranks, or a rank that is not a proxy.
  for (const auto& [hosts, silent] : {std::pair{"a,b", 3}, {"a,a,b,b", 0}, {"a,a,a,b", 3}, {"a,a,a,b", 1}})
    expect_named_when_silent(GetParam(), hosts, silent);
}

INSTANTIATE_TEST_SUITE_P(Hosts, SilentOverHosts, testing::ValuesIn(direct_calls()),
                         [](const auto& c) { return std::string(c.param.name); });

// --- A process that is killed while rows are in flight

class KilledOverHosts : public testing::TestWithParam<int> {};

TEST_P(KilledOverHosts, IsNamedByAll) { expect_named_when_killed<NormalRig>(GetParam()); }

#if !defined(__SANITIZE_THREAD__)  // it checks only one process
INSTANTIATE_TEST_SUITE_P(Hosts, KilledOverHosts, testing::Range(0, 8));
#else
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KilledOverHosts);
#endif

// --- Calls that differ

TEST(OverHosts, OtherCallsAreFound) {
  const auto all = outcomes(4, options_on("a,a,b,b", std::chrono::seconds(600)), [&](Group& group) {
    NormalRig rig(group);
    const Dispatched d = rig.dispatch();
    if (group.host() == 0)
      (void)rig.exchange.dispatch(rig.x(), d.handle);
    else
      rig.combine(d);
  });
  expect_mismatch(all);
}

TEST(OverHosts, OtherOptionsAreFound) {
  const auto all = outcomes(4, options_on("a,b", std::chrono::seconds(600)), [&](Group& group) {
    NormalRig rig(group, NormalRig::config(Staging::direct, Layout::expert_major));
    const Dispatched d = rig.dispatch();
    switchyard::CombineOptions o;
    o.order = group.host() == 0 ? CombineOrder::per_host : CombineOrder::per_rank;
    rig.exchange.combine(d.x, d.handle, rig.out.data(), o);
  });
  expect_mismatch(all);
}

/// A rank without room for its rows causes an error that leaves all ranks usable, including those on other hosts.
TEST(OverHosts, ARankWithoutRoomEndsTheCallEverywhere) {
  const auto all = outcomes(4, options_on("a,b", std::chrono::seconds(600)), [&](Group& group) {
    NormalRig rig(group);
    std::vector<std::byte> memory(4096);
    const switchyard::Rows out{memory.data(), 1, SmallArguments::kHidden, DType::bf16};
    switchyard::DispatchOptions o;
    o.out = group.rank() == 2 ? &out : nullptr;
    const Outcome first = outcome_of([&] { (void)rig.exchange.dispatch(rig.x(), rig.expert_ids(), rig.weights.data(), o); });
    EXPECT_EQ(code_name(first.code), "pool_exhausted") << first.text;
    EXPECT_NE(first.text.find("rank 2"), std::string::npos) << first.text;
    rig.round();
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

// --- Handles

TEST(OverHosts, HandlesOfOtherHostsAreRefused) {
  switchyard::Handle elsewhere[2], together[2];
  for (const auto& [hosts, handles] : {std::pair{"a,b", elsewhere}, {"a", together}}) {
    for (const Outcome& o : outcomes(2, options_on(hosts, std::chrono::seconds(60)), [&, made = handles](Group& group) {
           made[group.rank()] = NormalRig(group).dispatch().handle;
         }))
      EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
  std::barrier meet(2);
  for (const Outcome& o : outcomes(2, options_on("a,b", std::chrono::seconds(60)), [&](Group& group) {
         NormalRig rig(group);
         const auto refuse = [&](const switchyard::Handle& handle) {
           const Outcome refused = outcome_of([&] { (void)rig.exchange.allocate_rows(handle, DType::bf16); });
           meet.arrive_and_wait();
           return refused;
         };
         EXPECT_EQ(code_name(refuse(elsewhere[group.rank()]).code), "ok") << "hosts as before";
         const Outcome refused = refuse(together[group.rank()]);
         EXPECT_EQ(code_name(refused.code), "unsupported") << refused.text;
         EXPECT_NE(refused.text.find("dispatch again"), std::string::npos) << refused.text;
       }))
    EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

// --- Bits

/// Outputs of one scenario, by rank.
std::vector<std::vector<std::byte>> combined(const Case& c, const char* hosts) {
  std::vector<std::vector<std::byte>> all(static_cast<size_t>(c.problem.world));
  GroupOptions o = options_on(hosts, std::chrono::seconds(600));
  o.heap_bytes = heap_bytes({make_case(c.scenario)});
  for (const Outcome& end : outcomes(c.problem.world, o, [&](Group& group) {
         switchyard::detail::cross_in_rounds_of(group, 3000);
         NormalExchange exchange(group, make_config(c));
         RankData data(c, group.rank(), 0);
         const Dispatched d = exchange.dispatch(data.x(), data.ids(), data.weights());
         const switchyard::RowBuffer y = exchange.allocate_rows(d.handle, c.scenario.y_type);
         data.fill_outputs(y.rows());
         exchange.combine(y.rows(), d.handle, data.out(), data.combine_options());
         auto& out = all[static_cast<size_t>(group.rank())];
         out.resize(static_cast<size_t>(c.problem.tokens(group.rank()) * c.scenario.hidden * 2));
         if (!out.empty()) std::memcpy(out.data(), data.out(), out.size());
       }))
    EXPECT_EQ(code_name(end.code), "ok") << end.text;
  return all;
}

/// The results of per_rank and per_route do not depend on hosts. Those of per_host do; on a single host, they equal those of
/// per_route or per_rank.
TEST(OverHosts, BitsOfOrders) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    Scenario s;
    s.problem.world = 4;
    s.problem.experts = 12;
    s.problem.topk = 6;
    s.problem.layout = layout;
    s.tokens = {40, 31, 0, 22};
    s.num_bias = 1;
    const auto outputs = [&](CombineOrder order, const char* hosts) {
      s.order = order;
      return combined(*make_case(s), hosts);
    };
    const auto per_rank = outputs(CombineOrder::per_rank, "a");
    const auto per_route = layout == Layout::expert_major ? outputs(CombineOrder::per_route, "a") : per_rank;
    EXPECT_EQ(outputs(CombineOrder::per_host, "a"), per_route);
    const auto per_host = outputs(CombineOrder::per_host, "a,b");
    EXPECT_NE(per_host, per_route);
    EXPECT_NE(per_host, outputs(CombineOrder::per_host, "a,a,b,b"));
    for (const char* hosts : {"a,b", "a,a,b,b", "a,b,c,d", "a,a,a,b"}) {
      EXPECT_EQ(outputs(CombineOrder::per_rank, hosts), per_rank) << hosts;
      if (layout == Layout::expert_major) {
        EXPECT_EQ(outputs(CombineOrder::per_route, hosts), per_route) << hosts;
      }
    }
  }
}

// --- Bytes

/// The statistics count the rows that the carrier transfers, in both directions, and nothing else crosses but counts and
/// placements, whose size does not depend on the rows. What one rank sends, others receive.
TEST(OverHosts, NetworkBytesAreThoseOfTheCarrier) {
  Scenario s;
  s.problem.world = 4;
  s.problem.experts = 12;
  s.problem.topk = 6;
  s.tokens = {40, 31, 0, 22};
  for (const auto& [layout, order] : {std::pair{Layout::rank_major, CombineOrder::per_rank},
                                      {Layout::rank_major, CombineOrder::per_host},
                                      {Layout::expert_major, CombineOrder::per_rank},
                                      {Layout::expert_major, CombineOrder::per_route}}) {
    s.problem.layout = layout;
    s.order = order;
    const auto c = make_case(s);
    switchyard::detail::Carried carried[4];
    uint64_t rows[4][2] = {}, all[4][2] = {};  // statistic, carrier: sent by dispatches, received by combines
    GroupOptions o = options_on("a,a,a,b", std::chrono::seconds(600));
    o.heap_bytes = heap_bytes({c});
    std::barrier meet(4);
    for (const Outcome& end : outcomes(4, o, [&](Group& group) {
           const auto rank = static_cast<size_t>(group.rank());
           switchyard::detail::count_carried(group, carried[rank]);
           switchyard::detail::cross_in_rounds_of(group, 3000);
           NormalExchange exchange(group, make_config(*c));
           RankData data(*c, group.rank(), 0);
           const auto since = [&](const std::atomic<uint64_t>& bytes, auto&& call) {
             const uint64_t before = bytes;
             call();
             return bytes - before;
           };
           Dispatched d;
           all[rank][0] = since(carried[rank].sent, [&] { d = exchange.dispatch(data.x(), data.ids(), data.weights()); });
           rows[rank][0] = exchange.last_call().network_bytes;
           const switchyard::RowBuffer y = exchange.allocate_rows(d.handle, s.y_type);
           data.fill_outputs(y.rows());
           all[rank][1] =
               since(carried[rank].received, [&] { exchange.combine(y.rows(), d.handle, data.out(), data.combine_options()); });
           rows[rank][1] = exchange.last_call().network_bytes;
           EXPECT_EQ(rows[rank][0], bytes_over_network(*c, group.rank(), Crossing::dispatch, {0, 0, 0, 1}));
           EXPECT_EQ(rows[rank][1], bytes_over_network(*c, group.rank(), Crossing::combine, {0, 0, 0, 1}));
           meet.arrive_and_wait();
         }))
      EXPECT_EQ(code_name(end.code), "ok") << end.text;
    // Rank 3 is the proxy of three ranks. Each of these sends it a row of counts and a placement, and gets its placement.
    constexpr uint64_t kHead = 32, kPlacement = 64;
    const uint64_t counts = (32 + 4 * (4 + 12) + 63) / 64 * 64;
    for (size_t rank = 0; rank < 4; ++rank) {
      const uint64_t proxies = 1, sources = rank == 3 ? 3 : rank == 0 ? 1 : 0;
      EXPECT_EQ(all[rank][0], rows[rank][0] + proxies * (2 * kHead + counts + kPlacement)) << rank;
      EXPECT_EQ(all[rank][1], rows[rank][1] + sources * (kHead + kPlacement)) << rank;
    }
    uint64_t sent = 0, received = 0;
    for (const auto& of : carried) {
      sent += of.sent;
      received += of.received;
    }
    EXPECT_EQ(sent, received);
  }
}

// --- Traces

TEST(OverHosts, TracesShowWhatCrosses) {
  GroupOptions o = options_on("a,a,b,b", std::chrono::seconds(600));
  switchyard::TraceOptions t;
  t.num_blocks = o.num_blocks;
  t.num_warps = o.num_warps;
  switchyard::Trace trace(4, t);
  for (const Outcome& end : outcomes(4, o, [&](Group& group) {
         group.set_trace(&trace);
         NormalRig(group).round();
         group.set_trace(nullptr);
       }))
    EXPECT_EQ(code_name(end.code), "ok") << end.text;
  std::set<std::string> names;
  for (const auto& phase : trace.summary()) names.insert(phase.name);
  for (const char* name : {"pack_rows", "wait_network", "forward_rows", "sum_returned"})
    EXPECT_TRUE(names.contains(name)) << name;
}

}  // namespace
}  // namespace harness

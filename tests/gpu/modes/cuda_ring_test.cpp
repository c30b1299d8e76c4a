// SPDX-License-Identifier: Apache-2.0
// Ring staging on GPUs, beyond the acceptance suites, which run every case with both kinds of staging: streams, graphs, few
// warps for many streams, minimum memory, bounded private memory, and a rank that never calls.
#include <algorithm>

#include "gpu/harness/object_rig.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

constexpr Layout kLayouts[] = {Layout::rank_major, Layout::expert_major};

Scenario ring_scenario(const std::string& name, int world, Layout layout, int64_t tokens, uint64_t seed = 1) {
  Scenario s = gpu_scenario(name, world, layout, tokens, seed);
  s.staging = Staging::ring;
  s.ring = {3, 2, 4};
  return s;
}

class GpuRings : public testing::TestWithParam<int> {};

/// Covers the minimum number of slots for a token, one single-warp block for all streams or many blocks for few, and chunks of
/// one row and of all rows.
TEST_P(GpuRings, AnyNumberOfStreamsOnAnyNumberOfWarps) {
  const int world = GetParam();
  isolated([&] {
    for (const Layout layout : kLayouts) {
      for (const switchyard::RingSettings& ring : {switchyard::RingSettings{1, 1, 3}, switchyard::RingSettings{64, 1, 3},
                                                   switchyard::RingSettings{5, 16, 16}, switchyard::RingSettings{}}) {
        Scenario s = ring_scenario("streams", world, layout, 40);
        s.ring = ring;
        for (const int sms : {1, 2}) {
          s.num_sms = sms;
          const auto c = make_case(s);
          const NormalConfig config = make_config(*c);
          on_gpus(world, heap_for(config, world), [&](Station& me) {
            me.f.set_context(std::to_string(ring.num_channels) + " channels on " + std::to_string(sms) + " SMs");
            NormalExchange exchange(me.group, config);
            for (int i = 0; i < 3; ++i) me.round(exchange, *c, i);
          });
        }
      }
    }
  });
}

/// Every summation order, with weights and quantized rows, gives the same bits as direct staging.
TEST_P(GpuRings, SameBitsAsDirectStaging) {
  const int world = GetParam();
  for (const Layout layout : kLayouts) {
    Scenario s = ring_scenario("bits", world, layout, 33);
    s.hidden = 1024;
    s.drop_percent = 10;
    if (layout == Layout::expert_major) s.order = CombineOrder::per_route;
    const auto ring = make_case(s);
    s.staging = Staging::direct;
    const auto direct = make_case(s);
    const NormalConfig config = make_config(*ring), direct_config = make_config(*direct);
    on_gpus(world, heap_for(config, world) + heap_for(direct_config, world), [&](Station& me) {
      NormalExchange through_rings(me.group, config), directly(me.group, direct_config);
      std::vector<std::vector<std::byte>> outs;
      for (NormalExchange* exchange : {&through_rings, &directly}) {
        RankData data(*ring, me.rank(), 0);
        const Inputs in = me.upload(*ring, data);
        me.meet();
        const Dispatched d = exchange->dispatch(in.x, in.ids, in.weights, me.dispatch_options(*ring, me.stream()));
        exchange->combine(d.x, d.handle, in.out, me.combine_options(*ring, me.stream()));
        me.meet();
        outs.emplace_back(in.out_bytes);
        me.read(outs.back().data(), in.out, in.out_bytes);
        me.check_combined(data, in);
        me.meet();
      }
      me.f.check(outs[0] == outs[1], "the bits differ");
    });
  }
}

/// Nothing waits for the host, so a graph can be replayed, even after the group has slept. Also tests other streams and a stale
/// handle.
TEST_P(GpuRings, StreamsAndGraphs) {
  const int world = GetParam();
  const auto c = make_case(ring_scenario("graph", world, Layout::expert_major, 24));
  NormalConfig config = config_with_large_pool(*c, 4);
  on_gpus(world, heap_for(config, world), [&](Station& me) {
    switchyard::detail::number_calls_from(me.group, (uint64_t{1} << 40) - 6);
    NormalExchange exchange(me.group, config);
    RankData data(*c, me.rank(), 0), again(*c, me.rank(), 1);
    const Inputs in = me.upload(*c, data), more = me.upload(*c, again);
    me.meet();
    const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream(1)));
    exchange.combine(d.x, d.handle, in.out, me.combine_options(*c, me.stream(2)));
    me.meet();
    me.check_combined(data, in);
    me.meet();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    {
      const Dispatched fresh = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
      exchange.combine(fresh.x, fresh.handle, in.out, me.combine_options(*c, me.stream()));
      const Dispatched cached = exchange.dispatch(more.x, d.handle, me.dispatch_options(*c, me.stream()));
      exchange.combine(cached.x, d.handle, more.out, me.combine_options(*c, me.stream()));
    }
    must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    for (int i = 0; i < 20; ++i) {
      me.f.set_context("replay " + std::to_string(i));
      must(cudaMemsetAsync(in.out, 0xA5, in.out_bytes, me.stream()), "cudaMemset");
      must(cudaMemsetAsync(more.out, 0xA5, more.out_bytes, me.stream()), "cudaMemset");
      must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
      me.meet();
      me.check_combined(data, in);
      me.check_combined(again, more);
      me.meet();
      if (i != 10) continue;
      me.group.sleep();
      me.group.wake();
    }
    must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    must(cudaGraphDestroy(graph), "cudaGraphDestroy");
    me.meet();
    me.round(exchange, *c, 3);
  });
}

/// Outputs are outside the heap and within memory_required; too many at once cause an error on all ranks, which is not sticky.
TEST_P(GpuRings, OutputsArePrivateAndBounded) {
  const int world = GetParam();
  const auto c = make_case(ring_scenario("private", world, Layout::rank_major, 16));
  NormalConfig config = make_config(*c);
  config.pool_bytes = 0;
  const auto need = NormalExchange::memory_required(config, world, kBackend);
  EXPECT_EQ(need.pool_bytes, 0u);
  EXPECT_GT(need.private_bytes, 0u);
  on_gpus(world, heap_for(config, world), [&](Station& me) {
    NormalExchange exchange(me.group, config);
    RankData data(*c, me.rank(), 0);
    const Inputs in = me.upload(*c, data);
    me.meet();
    me.f.check(me.group.heap_used() <= need.total() + 4096, "more of the heap than announced");
    {
      std::vector<Dispatched> held;
      Outcome o;
      for (int i = 0; i < 20 && o.code == ErrorCode::ok; ++i) {
        o = outcome_of(
            [&] { held.push_back(exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()))); });
        me.meet();
        if (o.code == ErrorCode::ok) o = outcome_of([&] { me.group.check(); });
        me.meet();
      }
      me.f.equal(static_cast<int>(ErrorCode::pool_exhausted), static_cast<int>(o.code), "code, " + o.text);
      const auto* base = static_cast<const std::byte*>(held.front().x.data);
      me.f.check(base != nullptr, "no rows");
    }
    (void)outcome_of([&] { me.group.check(); });
    me.meet();
    me.round(exchange, *c, 2);
  });
}

TEST_P(GpuRings, ARankThatNeverCallsIsNamed) {
  const int world = GetParam();
  if (world == 1) GTEST_SKIP() << "one rank waits for nobody";
  const auto c = make_case(ring_scenario("silent", world, Layout::rank_major, 16));
  const NormalConfig config = config_with_large_pool(*c, 2);
  on_gpus(world, heap_for(config, world), 1s, [&](Station& me) {
    NormalExchange exchange(me.group, config);
    RankData data(*c, me.rank(), 0);
    const Inputs in = me.upload(*c, data);
    me.meet();
    const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
    me.meet();
    if (me.rank() != 1) exchange.combine(d.x, d.handle, in.out, me.combine_options(*c, me.stream()));
    me.meet();
    if (me.rank() != 1) {
      const Outcome o = outcome_of([&] { me.group.check(); });
      me.f.check(o.code == ErrorCode::peer_timeout && o.report.awaited_rank == 1,
                 std::string(switchyard::to_string(o.code)) + ": " + o.text);
    }
    me.f.check(cudaDeviceSynchronize() == cudaSuccess, "the context failed");
    me.gather();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuRings, testing::Values(1, 2, 4),
                         [](const auto& world) { return "W" + std::to_string(world.param); });

}  // namespace
}  // namespace harness

// SPDX-License-Identifier: Apache-2.0
// The GPU work of low-latency and flat calls: one launch per call, and no work between the halves of a split call.
#include <algorithm>

#include "gpu/harness/graph_nodes.hpp"
#include "gpu/harness/station_rig.hpp"
#include "gpu/kernels/full_gpu.hpp"
#include "modes/flat/flat_function.hpp"

namespace harness {
namespace {

using switchyard::LowLatencyExchange;

StreamedCase small_case(int world, ScaleKind scales) {
  StreamedCase c;
  Form& f = c.form;
  f.seed = 31 + static_cast<uint64_t>(scales);
  f.world = world;
  f.experts = 4 * world;
  f.topk = 4;
  f.max_tokens = 24;
  f.hidden = 1024;
  f.scales = scales;
  return c;
}

// --- Between the halves

struct HalvesCase {
  int world;
  ScaleKind scales;
  int num_sms;
};
class Halves : public testing::TestWithParam<HalvesCase> {};

/// Ranks send one after the other: a half ends before the next rank has enqueued anything, and the whole GPU is then free.
/// Ranks receive only after all have sent.
TEST_P(Halves, OfSendingWaitForNobodyAndHoldNothing) {
  const auto [world, scales, num_sms] = GetParam();
  StreamedCase c = small_case(world, scales);
  c.plan.num_sms = num_sms;
  on_gpus(world, LowLatencyExchange::heap_bytes(c.config(), world), 30s, [&](Station& me) {
    LowLatencyExchange exchange = c.make(me.group);
    StationRig rig(me);
    Calls streamed(rig, exchange, c);
    FullGpu gpu(me);
    int turns = 0;
    const auto in_turn = [&](const std::string& what, auto&& call) {
      streamed.between = [&] {
        ++turns;
        me.f.check(idle_within(me.stream(), 5s), what + ": the half that sends waits for a rank that has not called");
        gpu.expect_free(what);
        for (int r = me.rank(); r < world; ++r) me.gather();
      };
      me.f.set_context(what);
      me.meet();
      for (int r = 0; r < me.rank(); ++r) me.gather();
      call();
    };
    auto& lane = streamed.lane(0);
    for (uint64_t n = 1; n <= 12; n += 3) {
      in_turn("dispatch", [&] { streamed.dispatch({n}, lane, 0, {true, true, false, false, n % 2 == 0}); });
      in_turn("combine per_route", [&] { streamed.combine({n + 1}, lane, 0, {true, true, false, false}); });
      in_turn("combine per_rank", [&] { streamed.combine({n + 2}, lane, 0, {true, true, true, n % 2 == 0}); });
    }
    me.f.equal(12, turns, "split calls");
    expect_verdict(me, streamed, streamed.judged(), true);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Halves,
                         testing::Values(HalvesCase{2, ScaleKind::f32, 0}, HalvesCase{2, ScaleKind::none, 0},
                                         HalvesCase{3, ScaleKind::ue8m0, 2}, HalvesCase{4, ScaleKind::f32, 0}),
                         [](const auto& c) {
                           return "W" + std::to_string(c.param.world) + "_scales" +
                                  std::to_string(static_cast<int>(c.param.scales)) + "_sms" + std::to_string(c.param.num_sms);
                         });

// --- Launches

/// Memory for a call that is never run.
struct Unused {
  Unused(Station& me, const Form& f)
      : x{me.allocate(static_cast<size_t>(f.max_tokens * f.hidden) * 4), f.max_tokens, f.hidden, f.type},
        ids{me.allocate(static_cast<size_t>(f.max_tokens * f.topk) * 4), f.max_tokens, f.topk, false},
        out(me.allocate(static_cast<size_t>(f.max_tokens * f.hidden) * 4)),
        floats(reinterpret_cast<float*>(me.allocate(static_cast<size_t>(std::max(f.max_tokens * f.topk, f.experts)) * 4))),
        tokens(reinterpret_cast<int32_t*>(me.allocate(4))) {}
  switchyard::ConstRows x;
  switchyard::ExpertIds ids;
  void* out;
  float* floats;
  int32_t* tokens;
};

void check_dispatch_launches(Station& me, LowLatencyExchange& exchange, const Unused& u, switchyard::LowLatencyOutput& output) {
  switchyard::LowLatencyDispatchOptions o;
  o.stream = me.stream();
  const auto dispatch = [&](const std::string& what) {
    expect_one_launch(me, what, [&] { exchange.dispatch(u.x, u.ids, output, o); });
  };
  dispatch("dispatch");
  o.topk_weights = u.floats;
  dispatch("dispatch with weights");
  o.device_tokens = u.tokens;
  dispatch("dispatch of T in memory");
  o.num_sms = 1;
  dispatch("dispatch on one multiprocessor");
  // Data sent within a capture is received within it.
  expect_launches(2, me, "both halves of dispatch", [&] { exchange.dispatch_send(u.x, u.ids, output, o)(); });
}

void check_combine_launches(Station& me, LowLatencyExchange& exchange, const Unused& u,
                            const switchyard::LowLatencyOutput& output, const switchyard::LowLatencyRows& y) {
  switchyard::LowLatencyCombineOptions o;
  o.stream = me.stream();
  for (const CombineOrder order : {CombineOrder::per_route, CombineOrder::per_rank}) {
    const std::string name = order == CombineOrder::per_route ? "combine per_route" : "combine per_rank";
    o.order = order;
    expect_one_launch(me, name, [&] { exchange.combine(y, output, u.out, o); });
    expect_launches(2, me, name + ", both halves", [&] { exchange.combine_send(y, output, u.out, o)(); });
  }
  o.order = CombineOrder::per_route;
  o.topk_weights = u.floats;
  expect_one_launch(me, "combine with weights", [&] { exchange.combine(y, output, u.out, o); });
  o.expert_scale = u.floats;
  expect_one_launch(me, "combine with factors", [&] { exchange.combine(y, output, u.out, o); });
}

void check_all_to_all_launches(Station& me, LowLatencyExchange& exchange, const Unused& u,
                               const switchyard::RowFunction& function) {
  switchyard::AllToAllOptions o;
  o.stream = me.stream();
  const auto all_to_all = [&](const std::string& what) {
    expect_one_launch(me, "moe_all_to_all" + what, [&] { exchange.moe_all_to_all(u.x, u.ids, u.out, o); });
  };
  all_to_all("");
  o.topk_weights = u.floats;
  o.expert_scale = u.floats;
  all_to_all(" with weights and factors");
  o.device_tokens = u.tokens;
  all_to_all(" of T in memory");
  o.expert_scale = nullptr;
  o.row_function = &function;
  all_to_all(" of a row function");
}

/// There is no kernel before or after it, no memset, no copy and no host function.
TEST(LaunchesOfLowLatency, AreOneForEachCall) {
  constexpr int kWorld = 2;
  for (const ScaleKind scales : {ScaleKind::none, ScaleKind::f32, ScaleKind::ue8m0}) {
    for (const auto sending : {switchyard::Sending::per_rank, switchyard::Sending::per_route}) {
      StreamedCase c = small_case(kWorld, scales);
      c.sending = sending;
      on_gpus(kWorld, LowLatencyExchange::heap_bytes(c.config(), kWorld), [&](Station& me) {
        me.f.set_context("scales " + std::to_string(static_cast<int>(scales)));
        LowLatencyExchange exchange = c.make(me.group);
        switchyard::LowLatencyOutput output = exchange.make_output();
        const switchyard::LowLatencyRows y = exchange.make_rows(c.form.type);
        const Unused unused(me, c.form);
        const switchyard::RowFunction function = flat_function(1);  // waits for the device, so it must precede all captures
        me.meet();
        check_dispatch_launches(me, exchange, unused, output);
        check_combine_launches(me, exchange, unused, output, y);
        if (scales == ScaleKind::none) check_all_to_all_launches(me, exchange, unused, function);
        me.meet();
      });
    }
  }
}

}  // namespace
}  // namespace harness

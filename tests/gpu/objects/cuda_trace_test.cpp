// SPDX-License-Identifier: Apache-2.0
// GPU traces. Recorded calls give the same results. The trace contains every phase and every call of every rank, worker spans
// lie within a call, and times refer to this host's clock. Nothing is recorded before or after.
#include <atomic>

#include "gpu/harness/station_rig.hpp"
#include "gpu/harness/trace_rig.hpp"

namespace harness {
namespace {

using switchyard::LowLatencyExchange;
using switchyard::Trace;

constexpr int kWorld = 3;

StreamedCase small_case(ScaleKind scales) {
  StreamedCase c;
  c.form.seed = 9;
  c.form.world = kWorld;
  c.form.experts = 12;
  c.form.topk = 4;
  c.form.max_tokens = 12;
  c.form.hidden = 1024;
  c.form.scales = scales;
  return c;
}

TEST(TracesOnGpus, LowLatencyAndTheFlatExchange) {
  for (const ScaleKind scales : {ScaleKind::f32, ScaleKind::none}) {
    const StreamedCase c = small_case(scales);
    Trace trace(kWorld, large_trace_options());
    on_gpus(kWorld, LowLatencyExchange::heap_bytes(c.config(), kWorld), [&](Station& me) {
      LowLatencyExchange exchange = c.make(me.group);
      StationRig rig(me);
      Calls streamed(rig, exchange, c);
      me.meet();
      streamed.run(1, 5);
      me.meet();
      me.f.equal(size_t{0}, trace.slices().size(), "slices before recording");
      const Interval when = record(me, trace, [&] {
        for (uint64_t call = 100; call < 112; call += 3) {
          streamed.dispatch({call}, streamed.lane(0), 0, {call % 2 == 0, true, false, false});
          streamed.combine({call + 1}, streamed.lane(0), 0, {false, true, false, false});
          if (scales == ScaleKind::none) {
            streamed.all_to_all({call + 2}, streamed.lane(0), {});
          } else {
            streamed.combine({call + 2}, streamed.lane(0), 0, {false, true, true, false});
          }
        }
      });
      auto spans = judge_spans(me, trace, when);
      judge_order(me, trace, when);
      expect_phases(me, spans, {"send_rows", "send_counts", "place_rows", "return_rows", "sum_returned"});
      expect_calls(me, trace, Event::dispatch, 4, -1);
      expect_calls(me, trace, Event::combine, scales == ScaleKind::none ? 4 : 8, -1);
      expect_calls(me, trace, Event::all_to_all, scales == ScaleKind::none ? 4 : 0, -1);
      me.f.check(trace.clock_error_ns() > 0, "nothing is said of the clocks");
      const size_t recorded = trace.slices().size();
      me.gather();
      streamed.run(200, 5);
      expect_verdict(me, streamed, streamed.judged(), true);
      me.f.equal(recorded, trace.slices().size(), "slices after recording");
      me.gather();
    });
  }
}

struct NormalForm {
  Layout layout;
  Staging staging;
};

constexpr NormalForm kNormalForms[] = {{Layout::rank_major, Staging::direct},
                                       {Layout::expert_major, Staging::direct},
                                       {Layout::rank_major, Staging::ring},
                                       {Layout::expert_major, Staging::ring}};

/// `order` applies to expert-major rows; rank-major rows are summed per rank.
std::shared_ptr<const Case> normal_case(const NormalForm& form, CombineOrder order = CombineOrder::per_route) {
  Scenario s = gpu_scenario("traced", kWorld, form.layout, 20);
  if (form.layout == Layout::expert_major) s.order = order;
  s.staging = form.staging;
  if (form.staging == Staging::ring) s.ring = {3, 2, 4};
  return make_case(s);
}

TEST(TracesOnGpus, NormalMode) {
  for (const NormalForm& form : kNormalForms) {
    const auto [layout, staging] = form;
    const auto c = normal_case(form);
    const NormalConfig config = staging == Staging::ring ? make_config(*c) : config_with_large_pool(*c, 2);
    Trace trace(kWorld, large_trace_options());
    on_gpus(kWorld, heap_for(config, kWorld), [&](Station& me) {
      Case mine = *c;
      mine.scenario.num_sms = 2 * half_of_a_rank(kWorld);  // combine per_route pushes rows in the heap with 40 or more
      NormalExchange exchange(me.group, config);
      me.round(exchange, mine);
      const Interval when = record(me, trace, [&] {
        for (int i = 0; i < 3; ++i) me.round(exchange, mine, i);
      });
      const auto spans = judge_spans(me, trace, when);
      judge_order(me, trace, when);
      expect_phases(me, spans, {"plan", "wait_counts"});
      expect_calls(me, trace, Event::plan, 3,
                   int64_t{c->scenario.tokens[static_cast<size_t>(me.rank())]} * c->scenario.problem.topk);
      expect_calls(me, trace, Event::dispatch, 3, c->scenario.tokens[static_cast<size_t>(me.rank())]);
      expect_calls(me, trace, Event::combine, 3, c->scenario.tokens[static_cast<size_t>(me.rank())]);
      me.gather();
      if (staging == Staging::ring) return expect_phases(me, spans, {"ring_send", "ring_receive"});
      expect_phases(me, spans, {"send_rows", "wait_rows"});
      if (layout == Layout::rank_major) expect_phases(me, spans, {"pull_reduce"});
      if (layout == Layout::expert_major) expect_phases(me, spans, {"sum_returned"});
      if (layout == Layout::expert_major && mine.scenario.num_sms >= 40) expect_phases(me, spans, {"return_rows"});
      me.gather();
    });
  }
}

// --- A late rank

/// One rank is 20 ms late in every call: no long wait names another rank, and the waits for its rows and answers name it.
TEST(TracesOnGpus, WaitsOfLowLatencyNameTheLateRank) {
  constexpr int kLate = 2, kCalls = 6;
  constexpr uint64_t kDelay = 20'000'000;
  for (const ScaleKind scales : {ScaleKind::f32, ScaleKind::none}) {
    const StreamedCase c = small_case(scales);
    Trace trace(kWorld, large_trace_options());
    on_gpus(kWorld, LowLatencyExchange::heap_bytes(c.config(), kWorld), [&](Station& me) {
      LowLatencyExchange exchange = c.make(me.group);
      StationRig rig(me);
      Calls streamed(rig, exchange, c);
      auto& lane = streamed.lane(0);
      const auto late = [&](auto&& call) {
        me.meet();
        if (me.rank() == kLate) rig.pause(kDelay, me.stream());
        call();
      };
      record(me, trace, [&] {
        for (uint64_t n = 100; n < 100 + 3 * kCalls; n += 3) {
          late([&] { streamed.dispatch({n}, lane, 0, {}); });
          late([&] { streamed.combine({n + 1}, lane, 0, {}); });
          if (scales == ScaleKind::none) late([&] { streamed.all_to_all({n + 2}, lane, {}); });
        }
      });
      me.f.equal(uint64_t{0}, trace.lost(), "events that found no room");
      if (me.rank() != kLate) {
        auto named = waits_for(me, trace, kLate, kDelay / 2);
        const int calls = scales == ScaleKind::none ? 3 * kCalls : 2 * kCalls;
        me.f.check(named["long"] >= calls,
                   std::to_string(named["long"]) + " long waits in " + std::to_string(calls) + " calls");
        expect_phases(me, named, {"wait_entered", "wait_message"});  // answers may already have arrived at the first poll
      }
      expect_verdict(me, streamed, streamed.judged(), true);
    });
  }
}

/// Ranks wait for a late rank: for its counts in a dispatch, and for its placement in any kind of combine.
void expect_late_rank_named(const NormalForm& form, CombineOrder order) {
  constexpr int kLate = 2;
  constexpr uint64_t kDelay = 100'000'000, kTolerance = 20'000'000;  // the other ranks enter when their threads run
  const auto c = normal_case(form, order);
  const NormalConfig config = form.staging == Staging::ring ? make_config(*c) : config_with_large_pool(*c, 2);
  Trace trace(kWorld, large_trace_options());
  on_gpus(kWorld, heap_for(config, kWorld), [&](Station& me) {
    NormalExchange exchange(me.group, config);
    me.round(exchange, *c);
    auto* const sink = reinterpret_cast<float*>(me.allocate(4));
    RankData data(*c, me.rank(), 1);
    const Inputs in = me.upload(*c, data);
    record(me, trace, [&] {
      if (me.rank() == kLate) launch_busy(1, 32, kDelay, sink, me.stream());
      const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
      me.meet();
      if (me.rank() == kLate) launch_busy(1, 32, kDelay, sink, me.stream());
      exchange.combine(d.x, d.handle, in.out, me.combine_options(*c, me.stream()));
      me.meet();
    });
    for (const Event event : {Event::wait_counts, Event::wait_placement}) {
      if (me.rank() == kLate) break;
      const uint64_t longest = longest_wait(me, trace, event, kLate);
      me.f.check(longest + kTolerance >= kDelay, std::string(switchyard::detail::event_info(event).name) +
                                                     " for the late rank takes " + std::to_string(longest) + " ns");
    }
    me.check_combined(data, in);
    me.meet();
  });
}

TEST(TracesOnGpus, WaitsOfNormalModeNameTheLateRank) {
  for (const NormalForm& form : kNormalForms) {
    expect_late_rank_named(form, CombineOrder::per_route);
    if (form.layout == Layout::expert_major) expect_late_rank_named(form, CombineOrder::per_rank);
  }
}

// --- Bytes

TEST(TracesOnGpus, SpansOfLowLatencyCarryEveryByteThatCrosses) {
  for (const ScaleKind scales : {ScaleKind::f32, ScaleKind::none}) {
    const StreamedCase c = small_case(scales);
    Trace trace(kWorld, large_trace_options());
    std::atomic<uint64_t> reported{0};  // sum over ranks; with rings, the sender counts a row, the summing rank records it
    on_gpus(kWorld, LowLatencyExchange::heap_bytes(c.config(), kWorld), [&](Station& me) {
      LowLatencyExchange exchange = c.make(me.group);
      StationRig rig(me);
      Calls streamed(rig, exchange, c);
      auto& lane = streamed.lane(0);
      const auto counted = [&](auto&& call) {
        call();
        me.meet();
        reported += exchange.last_call().remote_bytes;
        me.gather();
      };
      record(me, trace, [&] {
        for (uint64_t n = 100; n < 120; n += 4) {
          counted([&] { streamed.dispatch({n}, lane, 0, {}); });
          counted([&] { streamed.combine({n + 1}, lane, 0, {}); });
          counted([&] { streamed.combine({n + 2}, lane, 0, {false, true, true}); });
          if (scales == ScaleKind::none) counted([&] { streamed.all_to_all({n + 3}, lane, {}); });
        }
      });
      me.f.check(reported > 0, "nothing crossed: proves nothing");
      me.f.equal(reported.load(), traced_bytes(trace), "bytes of the spans");
      me.meet();
    });
  }
}

TEST(TracesOnGpus, SpansOfNormalModeCarryEveryByteThatCrosses) {
  for (const NormalForm& form : kNormalForms) {
    const auto c = normal_case(form);
    const NormalConfig config = form.staging == Staging::ring ? make_config(*c) : config_with_large_pool(*c, 2);
    Trace trace(kWorld, large_trace_options());
    std::atomic<uint64_t> reported{0};  // sum over ranks; with rings, the sender counts a row, the summing rank records it
    on_gpus(kWorld, heap_for(config, kWorld), [&](Station& me) {
      me.f.set_context("layout " + std::to_string(static_cast<int>(form.layout)) + ", staging " +
                       std::to_string(static_cast<int>(form.staging)));
      NormalExchange exchange(me.group, config);
      RankData data(*c, me.rank(), 0);
      const Inputs in = me.upload(*c, data);
      const auto count = [&] {
        me.meet();
        reported += exchange.last_call().remote_bytes;
        me.gather();
      };
      record(me, trace, [&] {
        const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
        count();
        exchange.combine(d.x, d.handle, in.out, me.combine_options(*c, me.stream()));
        count();
      });
      me.f.check(reported > 0, "nothing crossed: proves nothing");
      me.f.equal(reported.load(), traced_bytes(trace), "bytes of the spans");
      me.meet();
    });
  }
}

}  // namespace
}  // namespace harness

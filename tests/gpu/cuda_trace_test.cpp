// SPDX-License-Identifier: Apache-2.0
// Traces of GPUs: calls that record give the same results, every phase and every call is there for every rank, what workers did
// lies in a call, times are this host's, and nothing is recorded before and after.
#include <algorithm>
#include <map>
#include <string>

#include "gpu/station_rig.hpp"
#include "switchyard/trace.hpp"
#include "trace/tracer.hpp"

namespace harness {
namespace {

using switchyard::LowLatencyExchange;
using switchyard::Trace;
using switchyard::TraceOptions;
using switchyard::detail::Event;
using switchyard::detail::Tracer;
using switchyard::detail::TraceRecord;

constexpr int kWorld = 3;

/// Room for every warp that a GPU may run, however many ranks share it.
TraceOptions roomy() {
  TraceOptions o;
  o.num_blocks = 160;
  o.num_warps = 32;
  o.events_per_track = 256;
  return o;
}

/// Host times between which something was recorded.
struct Interval {
  uint64_t begin, end;
};

std::string name_of(const TraceRecord& r) { return switchyard::detail::event_info(static_cast<Event>(r.event)).name; }

/// Spans of the calls, as kernels' begins and ends give them.
std::vector<TraceRecord> calls_of(const Tracer& tracer) {
  std::vector<TraceRecord> calls;
  for (size_t i = 0; i < tracer.size(switchyard::detail::kHostTrack); ++i) {
    const TraceRecord& r = tracer.record(switchyard::detail::kHostTrack, i);
    if (r.event != static_cast<uint16_t>(Event::barrier)) calls.push_back(r);
  }
  return calls;
}

/// Spans are in order, within the interval, and wait for ranks that exist; per phase: how many there are.
std::map<std::string, int> judge_spans(Station& me, const Trace& trace, const Interval& when) {
  constexpr uint64_t kTolerance = 5'000'000;    // of the clocks' alignment: microseconds in truth
  constexpr uint64_t kCallTolerance = 100'000;  // of a kernel's clocks against each other
  const Tracer& tracer = *trace.tracer(me.rank());
  const std::vector<TraceRecord> calls = calls_of(tracer);
  std::map<std::string, int> spans;
  for (int track = 0; track < tracer.workers(); ++track) {
    for (size_t i = 0; i < tracer.size(track); ++i) {
      const TraceRecord& r = tracer.record(track, i);
      const std::string name = name_of(r);
      ++spans[name];
      me.f.check(r.begin_ns <= r.end_ns, name + " ends before it begins");
      me.f.check(r.begin_ns + kTolerance >= when.begin && r.end_ns <= when.end + kTolerance,
                 name + " lies " + std::to_string(static_cast<int64_t>(r.begin_ns - when.begin)) + " ns behind the begin of " +
                     std::to_string(when.end - when.begin) + " ns of calls");
      const bool in_a_call = std::any_of(calls.begin(), calls.end(), [&](const TraceRecord& call) {
        return r.begin_ns + kCallTolerance >= call.begin_ns && r.end_ns <= call.end_ns + kCallTolerance;
      });
      me.f.check(in_a_call, name + " lies in none of " + std::to_string(calls.size()) + " calls");
      const bool wait = std::string(switchyard::detail::event_info(static_cast<Event>(r.event)).category) == "wait";
      me.f.check(!wait || (r.arg >= -1 && r.arg < kWorld), name + " awaits rank " + std::to_string(r.arg));
    }
  }
  me.f.equal(uint64_t{0}, trace.lost(), "events that found no room");
  return spans;
}

/// `wanted` calls of this kind, each of `arg` tokens or routes.
void expect_calls(Station& me, const Trace& trace, Event kind, int wanted, int64_t arg) {
  int found = 0;
  for (const TraceRecord& call : calls_of(*trace.tracer(me.rank()))) {
    if (call.event != static_cast<uint16_t>(kind)) continue;
    ++found;
    if (arg >= 0) me.f.equal(arg, call.arg, name_of(call) + ": argument");
    me.f.check(call.begin_ns < call.end_ns, name_of(call) + " takes no time");
  }
  me.f.equal(wanted, found, std::string("calls: ") + switchyard::detail::event_info(kind).name);
}

void expect_phases(Station& me, const std::map<std::string, int>& spans, std::initializer_list<const char*> wanted) {
  std::string all;
  for (const auto& [name, count] : spans) all += name + " (" + std::to_string(count) + ") ";
  for (const char* name : wanted) me.f.check(spans.count(name) > 0, std::string("no ") + name + " among: " + all);
}

/// Runs `body` while recording; what it enqueued has ended on all ranks afterwards.
template <class Body>
Interval record(Station& me, Trace& trace, Body&& body) {
  me.meet();
  me.group.set_trace(&trace);
  me.gather();
  const uint64_t begin = Tracer::now_ns();
  body();
  me.meet();
  const uint64_t end = Tracer::now_ns();
  me.group.set_trace(nullptr);
  me.gather();
  return {begin, end};
}

TEST(TracesOnGpus, LowLatencyAndTheFlatExchange) {
  for (const ScaleKind scales : {ScaleKind::f32, ScaleKind::none}) {
    StreamedCase c;
    c.form.seed = 9;
    c.form.world = kWorld;
    c.form.experts = 12;
    c.form.topk = 4;
    c.form.max_tokens = 12;
    c.form.hidden = 1024;
    c.form.scales = scales;
    Trace trace(kWorld, roomy());
    on_gpus(kWorld, LowLatencyExchange::heap_bytes_for(c.config(), kWorld), [&](Station& me) {
      LowLatencyExchange exchange(me.group, c.config());
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

TEST(TracesOnGpus, NormalMode) {
  for (const auto& [layout, staging] :
       {NormalForm{Layout::rank_major, Staging::direct}, NormalForm{Layout::expert_major, Staging::direct},
        NormalForm{Layout::rank_major, Staging::ring}, NormalForm{Layout::expert_major, Staging::ring}}) {
    Scenario s = gpu_scenario("traced", kWorld, layout, 20);
    if (layout == Layout::expert_major) s.order = CombineOrder::per_route;
    s.staging = staging;
    if (staging == Staging::ring) s.ring = {3, 2, 4};
    const auto c = make_case(s);
    const NormalConfig config = staging == Staging::ring ? make_config(*c) : roomy_config(*c, 2);
    Trace trace(kWorld, roomy());
    on_gpus(kWorld, heap_for(config, kWorld), [&](Station& me) {
      Case mine = *c;
      mine.scenario.num_sms = 2 * half_of_a_rank(kWorld);  // combine per_route pushes rows that lie in the heap from 40 on
      NormalExchange exchange(me.group, config);
      me.round(exchange, mine);
      const Interval when = record(me, trace, [&] {
        for (int i = 0; i < 3; ++i) me.round(exchange, mine, i);
      });
      const auto spans = judge_spans(me, trace, when);
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

}  // namespace
}  // namespace harness

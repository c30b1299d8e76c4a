// SPDX-License-Identifier: Apache-2.0
// Recording on GPUs, and checks of the properties that every trace must have.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "gpu/harness/object_rig.hpp"
#include "switchyard/trace.hpp"
#include "trace/tracer.hpp"

namespace harness {

using switchyard::detail::Event;
using switchyard::detail::Tracer;
using switchyard::detail::TraceRecord;

/// Capacity for every warp that a GPU can run, regardless of how many ranks share the GPU.
inline switchyard::TraceOptions large_trace_options() {
  switchyard::TraceOptions o;
  o.num_blocks = 160;
  o.num_warps = 32;
  o.events_per_track = 256;
  return o;
}

/// Host times of a recording.
struct Interval {
  uint64_t begin, end;
};

inline std::string name_of(const TraceRecord& r) { return switchyard::detail::event_info(static_cast<Event>(r.event)).name; }

/// Spans of the calls, computed from the start and end of their kernels.
inline std::vector<TraceRecord> calls_of(const Tracer& tracer) {
  std::vector<TraceRecord> calls;
  for (size_t i = 0; i < tracer.size(switchyard::detail::kHostTrack); ++i) {
    const TraceRecord& r = tracer.record(switchyard::detail::kHostTrack, i);
    if (r.event != static_cast<uint16_t>(Event::barrier)) calls.push_back(r);
  }
  return calls;
}

/// Tolerance among a kernel's clocks: its warps do not begin in the same cycle, and a timer may tick only every microsecond.
inline constexpr uint64_t kCallTolerance = 2'000;

/// Tolerance of a trace time relative to this host's clock: the trace's clock error, the tolerance within a call, and 10 ppm
/// for intervening changes in clock rate.
inline uint64_t clock_tolerance(const switchyard::Trace& trace, const Interval& when) {
  return trace.clock_error_ns() + kCallTolerance + (when.end - when.begin) / 100'000;
}

/// Checks that spans are in order and within the interval, and wait only for existing ranks. Returns their number per phase.
inline std::map<std::string, int> judge_spans(Station& me, const switchyard::Trace& trace, const Interval& when) {
  const uint64_t tolerance = clock_tolerance(trace, when);
  const Tracer& tracer = *trace.tracer(me.rank());
  const std::vector<TraceRecord> calls = calls_of(tracer);
  std::map<std::string, int> spans;
  for (int track = 0; track < tracer.workers(); ++track) {
    for (size_t i = 0; i < tracer.size(track); ++i) {
      const TraceRecord& r = tracer.record(track, i);
      const std::string name = name_of(r);
      ++spans[name];
      me.f.check(r.begin_ns <= r.end_ns, name + " ends before it begins");
      me.f.check(r.begin_ns + tolerance >= when.begin && r.end_ns <= when.end + tolerance,
                 name + " lies " + std::to_string(static_cast<int64_t>(r.begin_ns - when.begin)) + " ns behind the begin of " +
                     std::to_string(when.end - when.begin) + " ns of calls");
      const bool in_a_call = std::any_of(calls.begin(), calls.end(), [&](const TraceRecord& call) {
        return r.begin_ns + kCallTolerance >= call.begin_ns && r.end_ns <= call.end_ns + kCallTolerance;
      });
      me.f.check(in_a_call, name + " lies in none of " + std::to_string(calls.size()) + " calls");
      const bool wait = std::string(switchyard::detail::event_info(static_cast<Event>(r.event)).category) == "wait";
      me.f.check(!wait || (r.arg >= -1 && r.arg < me.world()), name + " awaits rank " + std::to_string(r.arg));
    }
  }
  me.f.equal(uint64_t{0}, trace.lost(), "events that found no room");
  return spans;
}

/// Expects `wanted` calls of the given kind, each with `arg` tokens or routes.
inline void expect_calls(Station& me, const switchyard::Trace& trace, Event kind, int wanted, int64_t arg) {
  int found = 0;
  for (const TraceRecord& call : calls_of(*trace.tracer(me.rank()))) {
    if (call.event != static_cast<uint16_t>(kind)) continue;
    ++found;
    if (arg >= 0) me.f.equal(arg, call.arg, name_of(call) + ": argument");
    me.f.check(call.begin_ns < call.end_ns, name_of(call) + " takes no time");
  }
  me.f.equal(wanted, found, std::string("calls: ") + switchyard::detail::event_info(kind).name);
}

inline void expect_phases(Station& me, const std::map<std::string, int>& spans, std::initializer_list<const char*> wanted) {
  std::string all;
  for (const auto& [name, count] : spans) all += name + " (" + std::to_string(count) + ") ";
  for (const char* name : wanted) me.f.check(spans.count(name) > 0, std::string("no ") + name + " among: " + all);
}

/// Calls f(record) for every record from the rank's workers.
template <class F>
void for_each_span(const switchyard::Trace& trace, int rank, F&& f) {
  const Tracer& tracer = *trace.tracer(rank);
  for (int track = 0; track < tracer.workers(); ++track)
    for (size_t i = 0; i < tracer.size(track); ++i) f(tracer.record(track, i));
}

/// Checks that no rank leaves a call that another rank has not begun, and that no wait for rows from a rank ends before that
/// rank has begun to send. Requires every rank to make the calls in the same order.
inline void judge_order(Station& me, const switchyard::Trace& trace, const Interval& when) {
  const uint64_t tolerance = 2 * clock_tolerance(trace, when);
  const auto exchanges_of = [&](int rank) {
    std::vector<TraceRecord> calls = calls_of(*trace.tracer(rank));
    std::erase_if(calls, [](const TraceRecord& r) { return r.event == static_cast<uint16_t>(Event::plan); });
    return calls;
  };
  const std::map<std::string, std::string> cause_of = {
      {"wait_message", "send_rows"}, {"wait_rows", "send_rows"}, {"wait_returned", "return_rows"}};
  const std::vector<TraceRecord> mine = exchanges_of(me.rank());
  for (int r = 0; r < me.world(); ++r) {
    const std::vector<TraceRecord> theirs = exchanges_of(r);
    if (!me.f.equal(mine.size(), theirs.size(), "calls of rank " + std::to_string(r))) continue;
    for (size_t i = 0; i < mine.size(); ++i) {
      me.f.equal(name_of(mine[i]), name_of(theirs[i]), "call " + std::to_string(i) + " of rank " + std::to_string(r));
      me.f.check(mine[i].end_ns + tolerance >= theirs[i].begin_ns,
                 name_of(mine[i]) + " " + std::to_string(i) + " ends before rank " + std::to_string(r) + " begins it");
    }
    std::map<std::string, uint64_t> first;  // begin of a rank's first span
    for_each_span(trace, r, [&](const TraceRecord& span) {
      uint64_t& begin = first.try_emplace(name_of(span), span.begin_ns).first->second;
      begin = std::min(begin, span.begin_ns);
    });
    for_each_span(trace, me.rank(), [&](const TraceRecord& span) {
      const auto cause = cause_of.find(name_of(span));
      if (cause == cause_of.end() || span.arg != r) return;
      const auto sent = first.find(cause->second);
      me.f.check(sent != first.end() && sent->second <= span.end_ns + tolerance,
                 name_of(span) + " for rank " + std::to_string(r) + " ends before that rank's first " + cause->second);
    });
  }
}

/// Waits of this rank that name `late`, by phase; those longer than `max_wait_ns` also count as "long". `directly`: expects
/// that no other rank is awaited that long; not valid if ranks wait for others that wait for `late`. Call after recording.
inline std::map<std::string, int> waits_for(Station& me, const switchyard::Trace& trace, int late, uint64_t max_wait_ns,
                                            bool directly = true) {
  std::map<std::string, int> named;
  for_each_span(trace, me.rank(), [&](const TraceRecord& r) {
    if (std::string(switchyard::detail::event_info(static_cast<Event>(r.event)).category) != "wait") return;
    if (r.arg == late) {
      ++named[name_of(r)];
      named["long"] += r.end_ns - r.begin_ns > max_wait_ns;
    } else if (directly) {
      me.f.check(r.end_ns - r.begin_ns <= max_wait_ns, name_of(r) + " of " + std::to_string((r.end_ns - r.begin_ns) / 1000) +
                                                           " us names rank " + std::to_string(r.arg));
    }
  });
  return named;
}

/// Duration in nanoseconds of this rank's longest `event` span that names rank `late`, or 0 if there is none. Call after
/// recording.
inline uint64_t longest_wait(Station& me, const switchyard::Trace& trace, Event event, int late) {
  uint64_t longest = 0;
  for_each_span(trace, me.rank(), [&](const TraceRecord& r) {
    if (r.event == static_cast<uint16_t>(event) && r.arg == late) longest = std::max(longest, r.end_ns - r.begin_ns);
  });
  return longest;
}

/// Total bytes in the spans of all ranks. Call after recording.
inline uint64_t traced_bytes(const switchyard::Trace& trace) {
  uint64_t bytes = 0;
  for (const auto& phase : trace.summary()) bytes += phase.bytes;
  return bytes;
}

/// Runs `body` while recording. When it returns, all work enqueued by `body` has ended on all ranks.
template <class Body>
Interval record(Station& me, switchyard::Trace& trace, Body&& body) {
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

}  // namespace harness

// SPDX-License-Identifier: Apache-2.0
// The trace facility: recording, merging, and the JSON output as read by an independent parser.
#include "switchyard/trace.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "switchyard/status.hpp"
#include "trace/tracer.hpp"

namespace switchyard {
namespace {

using detail::Event;
using detail::RecordKind;
using detail::Tracer;
using detail::TraceRecord;
using detail::TraceSpan;
using nlohmann::json;

TraceOptions small(int blocks, int warps, size_t events = 64) {
  TraceOptions options;
  options.num_blocks = blocks;
  options.num_warps = warps;
  options.events_per_track = events;
  return options;
}

void put_span(Trace& trace, int rank, int track, Event event, uint64_t begin, uint64_t end, int64_t arg) {
  trace.tracer(rank)->span(track, event, begin, end, arg);
}

json only_phase(const json& doc, const std::string& ph) {
  json out = json::array();
  for (const json& e : doc["traceEvents"]) {
    if (e["ph"] == ph) out.push_back(e);
  }
  return out;
}

TEST(TraceTable, NamesAreUniqueAndComplete) {
  std::set<std::string> names;
  for (uint16_t e = 0; e < static_cast<uint16_t>(Event::count_of_events); ++e) {
    const detail::EventInfo& info = detail::event_info(static_cast<Event>(e));
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_NE(std::string(info.category), "");
    EXPECT_NE(std::string(info.unit), "");
  }
  for (const char* needed : {"plan", "exchange_counts", "wait_counts", "wait_placement", "send_rows", "wait_rows",
                             "place_aliases", "copy_out", "zero_padding", "reduce_local", "wait_outputs", "pull_reduce",
                             "wait_pulled", "ring_send", "ring_receive", "wait_ring", "expert_mlp", "gate"}) {
    EXPECT_EQ(names.count(needed), 1u) << needed;
  }
}

TEST(Tracer, NullTracerRecordsNothingAndActiveOneRecordsInterval) {
  { TraceSpan span(nullptr, 0, Event::plan, 3); }
  Tracer tracer(2, 1, 2, 8);
  const uint64_t before = Tracer::ticks();
  {
    TraceSpan span(&tracer, 1, Event::send_rows, 3);
    span.set_arg(5);
  }
  const uint64_t after = Tracer::ticks();
  ASSERT_EQ(tracer.size(1), 1u);
  EXPECT_EQ(tracer.size(0), 0u);
  const TraceRecord& r = tracer.record(1, 0);
  EXPECT_EQ(r.event, static_cast<uint16_t>(Event::send_rows));
  EXPECT_EQ(r.arg, 5);
  EXPECT_LE(before, r.begin_ns);
  EXPECT_LE(r.begin_ns, r.end_ns);
  EXPECT_LE(r.end_ns, after);
}

TEST(Tracer, FullTrackCountsLostAndKeepsTheNewest) {
  Tracer tracer(0, 1, 1, 3);
  for (int i = 0; i < 10; ++i) tracer.instant(0, Event::plan, i);
  ASSERT_EQ(tracer.size(0), 3u);
  EXPECT_EQ(tracer.lost(0), 7u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(tracer.record(0, static_cast<size_t>(i)).arg, 7 + i);
  tracer.clear();
  EXPECT_EQ(tracer.size(0), 0u);
  EXPECT_EQ(tracer.lost(0), 0u);
  tracer.instant(0, Event::plan, 42);
  EXPECT_EQ(tracer.record(0, 0).arg, 42);
}

TEST(Tracer, WorkersAppendConcurrently) {
  constexpr int kWorkers = 6;
  constexpr int kEvents = 2000;
  Trace trace(2, small(3, 2, kEvents));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    for (int w = 0; w < kWorkers; ++w) {
      threads.emplace_back([&trace, rank, w] {
        for (int i = 0; i < kEvents; ++i) TraceSpan span(trace.tracer(rank), w, Event::send_rows, i);
      });
    }
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(trace.lost(), 0u);
  for (int rank = 0; rank < 2; ++rank) {
    for (int w = 0; w < kWorkers; ++w) {
      ASSERT_EQ(trace.tracer(rank)->size(w), static_cast<size_t>(kEvents));
      for (int i = 0; i < kEvents; ++i) ASSERT_EQ(trace.tracer(rank)->record(w, static_cast<size_t>(i)).arg, i);
    }
  }
}

TEST(Trace, ArgumentsAreChecked) {
  for (const int world : {0, -1, 65}) {
    try {
      Trace trace(world);
      FAIL() << "no error for world " << world;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(e.what()).find("world is " + std::to_string(world)), std::string::npos) << e.what();
    }
  }
  EXPECT_THROW(Trace(1, small(0, 1)), Error);
  EXPECT_THROW(Trace(1, small(1, 0)), Error);
  EXPECT_THROW(Trace(1, small(1, 1, 0)), Error);
}

TEST(Trace, JsonHasOneProcessPerRankAndOneThreadPerTrack) {
  Trace trace(3, small(2, 2));
  const json doc = json::parse(trace.chrome_json());
  EXPECT_EQ(doc["otherData"]["world"], 3);
  std::set<std::pair<int, std::string>> threads;
  std::set<std::string> processes;
  for (const json& e : only_phase(doc, "M")) {
    if (e["name"] == "process_name") processes.insert(e["args"]["name"].get<std::string>());
    if (e["name"] == "thread_name") threads.insert({e["pid"].get<int>(), e["args"]["name"].get<std::string>()});
  }
  EXPECT_EQ(processes, (std::set<std::string>{"rank 0", "rank 1", "rank 2"}));
  std::set<std::pair<int, std::string>> expected;
  for (int r = 0; r < 3; ++r) {
    for (const char* name : {"calls", "block 0 warp 0", "block 0 warp 1", "block 1 warp 0", "block 1 warp 1"})
      expected.insert({r, name});
  }
  EXPECT_EQ(threads, expected);
}

/// Checks a time that readers may round or truncate to whole nanoseconds.
void expect_micros(const json& time, int64_t ns) {
  const double read = time.get<double>() * 1000.0;
  EXPECT_EQ(std::llround(read), ns);
  EXPECT_EQ(static_cast<int64_t>(read), ns);
}

TEST(Trace, JsonTimesAreExactAndRelativeToTheFirstEvent) {
  Trace trace(2, small(1, 2));
  const uint64_t t0 = 7'000'000'000'123ULL;  // a steady clock after two hours: microseconds in a double are still exact
  put_span(trace, 1, 1, Event::send_rows, t0 + 1'001, t0 + 3'456'789, 17);
  put_span(trace, 0, detail::kHostTrack, Event::dispatch, t0, t0 + 5'000'000, 512);
  trace.tracer(0)->append(0, {t0 + 2'500, t0 + 2'500, 8, static_cast<uint16_t>(Event::gate), RecordKind::instant});
  const json doc = json::parse(trace.chrome_json());
  const json spans = only_phase(doc, "X");
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0]["name"], "dispatch");
  EXPECT_EQ(spans[0]["cat"], "call");
  EXPECT_EQ(spans[0]["pid"], 0);
  EXPECT_EQ(spans[0]["tid"], 0);
  EXPECT_EQ(spans[0]["ts"], 0.0);
  EXPECT_EQ(spans[0]["dur"], 5000.0);
  EXPECT_EQ(spans[0]["args"]["tokens"], 512);
  EXPECT_EQ(spans[1]["name"], "send_rows");
  EXPECT_EQ(spans[1]["pid"], 1);
  EXPECT_EQ(spans[1]["tid"], 2);
  expect_micros(spans[1]["ts"], 1'001);
  expect_micros(spans[1]["dur"], 3'455'788);
  EXPECT_EQ(spans[1]["args"]["rows"], 17);
  EXPECT_EQ(only_phase(doc, "C").size(), 0u);  // no span carries bytes
  ASSERT_EQ(only_phase(doc, "i").size(), 1u);
  EXPECT_EQ(only_phase(doc, "i")[0]["ts"], 2.5);
}

TEST(Trace, FlowsLeadFromTheLastPossibleSendToTheWait) {
  Trace trace(2, small(1, 1));
  put_span(trace, 0, 0, Event::send_rows, 1'000, 2'000, 1);
  put_span(trace, 0, 0, Event::send_rows, 2'000, 4'000, 1);
  put_span(trace, 0, 0, Event::send_rows, 9'000, 9'500, 1);   // after the wait: cannot be the cause
  put_span(trace, 1, 0, Event::wait_rows, 1'500, 5'000, 0);   // for rank 0
  put_span(trace, 1, 0, Event::wait_rows, 5'000, 6'000, 1);   // for itself: no arrow
  put_span(trace, 1, 0, Event::wait_rows, 6'000, 7'000, -1);  // for several: no arrow
  const json doc = json::parse(trace.chrome_json(true));
  const json starts = only_phase(doc, "s");
  const json ends = only_phase(doc, "f");
  ASSERT_EQ(starts.size(), 1u);
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(starts[0]["id"], ends[0]["id"]);
  EXPECT_EQ(starts[0]["pid"], 0);
  expect_micros(starts[0]["ts"], 2'997);  // inside the slices to which they belong; see trace_arrows_test
  EXPECT_EQ(ends[0]["pid"], 1);
  expect_micros(ends[0]["ts"], 3'997);
  EXPECT_TRUE(only_phase(json::parse(trace.chrome_json(false)), "s").empty());
}

TEST(Trace, FlowsIntoWaitsForPlacementsStartInTheirCall) {
  // Dispatch publishes its placement after the counts; combine publishes it when a rank enters the call.
  Trace trace(2, small(1, 1));
  put_span(trace, 0, detail::kHostTrack, Event::combine, 1'000, 1'500, 1);  // the previous one
  put_span(trace, 0, detail::kHostTrack, Event::dispatch, 2'000, 5'000, 1);
  put_span(trace, 0, detail::kHostTrack, Event::exchange_counts, 3'000, 4'000, 1);
  put_span(trace, 0, detail::kHostTrack, Event::combine, 7'000, 9'000, 1);
  put_span(trace, 1, 0, Event::wait_counts, 2'000, 3'500, 0);
  put_span(trace, 1, 0, Event::wait_placement, 3'500, 4'500, 0);
  put_span(trace, 1, 0, Event::wait_placement, 6'000, 8'000, 0);
  const json starts = only_phase(json::parse(trace.chrome_json(true)), "s");
  ASSERT_EQ(starts.size(), 3u);
  EXPECT_EQ(starts[0]["ts"], 2.0);  // relative to the first event
  EXPECT_EQ(starts[1]["ts"], 2.0);
  EXPECT_EQ(starts[2]["ts"], 6.0);
}

TEST(Trace, FlowsFollowEveryKindOfWait) {
  struct Pair {
    Event wait, cause;
    int track;       // of the cause
    uint64_t at_ns;  // time at which its signal is raised, for a span from 1000 to 2000
  };
  constexpr int kCalls = detail::kHostTrack;
  for (const Pair& p : {Pair{Event::wait_entered, Event::combine, kCalls, 1'000},
                        {Event::wait_entered, Event::all_to_all, kCalls, 1'000},
                        {Event::wait_counts, Event::exchange_counts, kCalls, 1'000},
                        {Event::wait_counts, Event::plan, 0, 2'000},
                        {Event::wait_outputs, Event::combine, kCalls, 1'000},
                        {Event::wait_outputs, Event::return_rows, 0, 2'000},
                        {Event::wait_pulled, Event::pull_reduce, 0, 2'000},
                        {Event::wait_message, Event::send_rows, 0, 2'000},
                        {Event::wait_expert_count, Event::send_counts, 0, 2'000},
                        {Event::wait_returned, Event::return_rows, 0, 2'000},
                        {Event::wait_ledger_rows, Event::return_segments, 0, 2'000},
                        {Event::wait_ring, Event::ring_send, 0, 2'000},
                        {Event::wait_ring, Event::ring_receive, 0, 2'000}}) {
    Trace trace(2, small(1, 1));
    put_span(trace, 0, 0, Event::zero_padding, 500, 2'500, 1);  // never a cause
    put_span(trace, 0, p.track, p.cause, 1'000, 2'000, 1);
    put_span(trace, 1, 0, p.wait, 500, 3'000, 0);
    const json starts = only_phase(json::parse(trace.chrome_json(true)), "s");
    ASSERT_EQ(starts.size(), 1u) << detail::event_info(p.wait).name;
    EXPECT_EQ(starts[0]["pid"], 0);
    EXPECT_EQ(starts[0]["tid"], p.track + 1);
    const uint64_t inside = p.at_ns == 1'000 ? p.at_ns : p.at_ns - 3;
    SCOPED_TRACE(detail::event_info(p.wait).name);
    expect_micros(starts[0]["ts"], static_cast<int64_t>(inside - 500));
  }
}

TEST(Trace, BytesInFlightAreThoseOfOpenSpans) {
  Trace trace(2, small(1, 2));
  trace.tracer(0)->span(0, Event::send_rows, 1'000, 3'000, 1, 100);
  trace.tracer(0)->span(1, Event::send_rows, 2'000, 4'000, 1, 50);
  trace.tracer(0)->span(0, Event::send_rows, 3'000, 5'000, 1, 100);  // begins where another span with the same bytes ends
  trace.tracer(0)->span(1, Event::place_rows, 4'500, 4'700, 1);      // stays on this rank
  trace.tracer(1)->span(0, Event::pull_reduce, 1'000, 2'000, 1, detail::record_bytes(uint64_t{5} << 30));
  const json doc = json::parse(trace.chrome_json());
  std::vector<std::tuple<int, double, uint64_t>> seen;
  for (const json& e : only_phase(doc, "C")) {
    EXPECT_EQ(e["name"], "bytes in flight");
    seen.emplace_back(e["pid"].get<int>(), e["ts"].get<double>(), e["args"]["bytes"].get<uint64_t>());
  }
  EXPECT_EQ(seen, (std::vector<std::tuple<int, double, uint64_t>>{
                      {0, 0.0, 100}, {0, 1.0, 150}, {0, 3.0, 100}, {0, 4.0, 0}, {1, 0.0, 0xffffffffu}, {1, 1.0, 0}}));
  const json spans = only_phase(doc, "X");
  EXPECT_EQ(spans[0]["args"]["bytes"], 100);
  EXPECT_EQ(spans[0]["args"]["rows"], 1);
  for (const TracePhase& p : trace.summary())
    if (p.rank == 0 && p.name == "send_rows") {
      EXPECT_EQ(p.bytes, 250u);
    }
}

TEST(Trace, SummaryAddsUpByPhaseAndRank) {
  Trace trace(2, small(1, 2));
  put_span(trace, 1, 0, Event::send_rows, 0, 1'000'000, 10);
  put_span(trace, 1, 0, Event::send_rows, 1'000'000, 4'000'000, 20);
  put_span(trace, 1, 1, Event::send_rows, 0, 2'000'000, 5);
  put_span(trace, 0, 0, Event::wait_rows, 0, 500'000, 1);
  const std::vector<TracePhase> phases = trace.summary();
  ASSERT_EQ(phases.size(), 2u);
  EXPECT_EQ(phases[0].name, "wait_rows");
  EXPECT_EQ(phases[0].category, "wait");
  EXPECT_EQ(phases[0].rank, 0);
  EXPECT_DOUBLE_EQ(phases[0].total_ms, 0.5);
  EXPECT_EQ(phases[1].name, "send_rows");
  EXPECT_EQ(phases[1].rank, 1);
  EXPECT_EQ(phases[1].count, 3u);
  EXPECT_DOUBLE_EQ(phases[1].total_ms, 6.0);
  EXPECT_DOUBLE_EQ(phases[1].max_ms, 3.0);
  EXPECT_DOUBLE_EQ(phases[1].slowest_ms, 4.0);
  EXPECT_EQ(phases[1].arg_sum, 35);
  EXPECT_EQ(phases[1].unit, "rows");
}

TEST(Trace, SlicesNestByBeginThenLength) {
  Trace trace(1, small(1, 1));
  put_span(trace, 0, 0, Event::plan, 1'000, 2'000, 0);
  put_span(trace, 0, 0, Event::dispatch, 1'000, 9'000, 0);
  const std::vector<TraceSlice> slices = trace.slices();
  ASSERT_EQ(slices.size(), 2u);
  EXPECT_EQ(slices[0].name, "dispatch");
  EXPECT_EQ(slices[1].name, "plan");
  EXPECT_DOUBLE_EQ(slices[0].duration_us, 8.0);
}

TEST(Trace, OwnEventsAreNamedEscapedAndBuiltInNamesAreReused) {
  Trace trace(1, small(1, 1));
  EXPECT_EQ(trace.event("gate"), static_cast<uint16_t>(Event::gate));
  const std::string name = "my \"phase\" \\ one\n";
  const uint16_t own = trace.event(name, "items");
  EXPECT_EQ(trace.event(name), own);
  {
    Trace::Span span(&trace, 0, own, 4);
    span.set_arg(6);
  }
  { Trace::Span span(nullptr, 0, own, 4); }
  const json doc = json::parse(trace.chrome_json());
  const json spans = only_phase(doc, "X");
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0]["name"], name);
  EXPECT_EQ(spans[0]["cat"], "user");
  EXPECT_EQ(spans[0]["args"]["items"], 6);
}

/// Spans are timed by a counter whose unit need not be nanoseconds; times that are read back refer to the steady clock.
TEST(Trace, SpansAreOnTheSteadyClock) {
  constexpr uint64_t kSlackNs = 50'000;  // anchors are taken while other threads run
  Trace trace(2, small(1, 1));
  const uint16_t own = trace.event("own");
  for (int i = 0; i < 3; ++i) {
    const uint64_t begin = Tracer::now_ns();
    {
      const Trace::Span span(&trace, 1, own);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    put_span(trace, 0, 0, Event::plan, begin - kSlackNs, Tracer::now_ns() + kSlackNs, 0);  // around it
    trace.tracer(0)->add_anchor();
  }
  Trace merged(2, small(1, 1));
  for (int rank = 0; rank < 2; ++rank) merged.merge(trace.serialize(rank));
  for (const Trace* t : {&trace, &merged}) {
    const std::vector<TraceSlice> all = t->slices();
    ASSERT_EQ(all.size(), 6u);
    for (size_t i = 0; i < 3; ++i) {
      const TraceSlice &around = all[i], &inner = all[3 + i];
      EXPECT_LE(around.begin_us, inner.begin_us);
      EXPECT_GE(around.begin_us + around.duration_us, inner.begin_us + inner.duration_us);
      EXPECT_GE(inner.duration_us, 5000 - 50);
    }
  }
}

TEST(TickClock, TimesAreBetweenAnchors) {
  detail::TickClock clock;
  clock.add_latest(1000, 5000, 100);
  EXPECT_FALSE(clock.usable());
  clock.add_latest(1010, 5020, 100);  // close to the first one, which is kept
  EXPECT_TRUE(clock.usable());
  EXPECT_EQ(clock.ns(1005), 5010u);
  clock.add_latest(1030, 5060, 100);  // replaces the second
  clock.add_latest(2030, 6060, 100);
  clock.sort();
  EXPECT_EQ(clock.ns(1015), 5030u);
  EXPECT_EQ(clock.ns(1030), 5060u);
  EXPECT_EQ(clock.ns(1530), 5560u);
  EXPECT_EQ(clock.ns(1030 - 103), 4925u);  // 1060 ns in 1030 ticks
  EXPECT_EQ(clock.ns(2030 + 1030), 7120u);
}

/// The end of a kernel and the beginning of the next may be a few ticks apart, yet have the same time on a coarse clock.
TEST(TickClock, OutsideItsAnchorsTheWholeRecordingSaysHowFastItCounts) {
  detail::TickClock clock;
  clock.add(100'000, 60'000);
  clock.add(100'040, 60'000);
  clock.add(140'000, 80'000);
  clock.add(140'010, 80'300);
  clock.sort();
  EXPECT_NEAR(static_cast<double>(clock.ns(80'000)), 50'000, 200);
  EXPECT_NEAR(static_cast<double>(clock.ns(150'000)), 85'300, 200);
  EXPECT_EQ(clock.ns(100'020), 60'000u);
  detail::TickClock stands;
  stands.add(10, 500);
  stands.add(20, 500);
  stands.sort();
  for (const uint64_t ticks : {0u, 10u, 15u, 20u, 1'000u}) EXPECT_EQ(stands.ns(ticks), 500u);
  detail::TickClock one;
  one.add(10, 500);
  one.add(10, 500);
  EXPECT_EQ(one.ns(7), 500u);
}

TEST(Trace, TracksHoldTheNextPowerOfTwo) {
  Trace trace(1, small(1, 1, 300));
  for (int i = 0; i < 513; ++i) trace.tracer(0)->instant(0, Event::plan, i);
  EXPECT_EQ(trace.tracer(0)->size(0), 512u);
  EXPECT_EQ(trace.lost(), 1u);
  EXPECT_EQ(trace.options().events_per_track, 300u);
}

TEST(Trace, OwnEventsCauseNoWait) {
  Trace trace(2, small(1, 1, 256));
  std::vector<uint16_t> own;
  for (int i = 0; i < 40; ++i) own.push_back(trace.event("phase " + std::to_string(i)));
  for (const uint16_t event : own)
    for (const uint64_t begin : {30u, 10u, 20u}) trace.tracer(1)->append(0, {begin, begin + 5, 0, event, RecordKind::span});
  put_span(trace, 1, 0, Event::send_rows, 40, 50, 0);
  put_span(trace, 0, 0, Event::wait_rows, 10, 60, 1);
  const json doc = json::parse(trace.chrome_json(true));
  EXPECT_EQ(only_phase(doc, "X").size(), 3 * own.size() + 2 + 1);  // and the arrow's marker
  ASSERT_EQ(only_phase(doc, "s").size(), 1u);
  expect_micros(only_phase(doc, "s")[0]["ts"], 37);
}

TEST(Trace, MergeMovesARankBetweenProcesses) {
  Trace there(2, small(1, 2, 2));
  const uint16_t other = there.event("other");
  const uint16_t mine = there.event("mine", "apples");
  (void)other;
  { Trace::Span span(&there, 1, mine, 3); }
  put_span(there, 1, 1, Event::place_rows, 100, 300, 7);
  for (int i = 0; i < 5; ++i) there.tracer(1)->instant(0, Event::plan, i);  // 3 of 5 are lost
  there.tracer(1)->set_clock_error_ns(700);
  Trace here(2, small(1, 2, 2));
  here.merge(there.serialize(1));
  EXPECT_EQ(here.lost(), 3u);
  EXPECT_EQ(here.clock_error_ns(), 700u);
  EXPECT_EQ(here.tracer(1)->record(0, 0).arg, 3) << "oldest first";
  bool saw_mine = false;
  for (const TracePhase& p : here.summary()) {
    EXPECT_EQ(p.rank, 1);
    if (p.name != "mine") continue;
    saw_mine = true;
    EXPECT_EQ(p.unit, "apples");
    EXPECT_EQ(p.arg_sum, 3);
  }
  EXPECT_TRUE(saw_mine);
  EXPECT_EQ(here.tracer(1)->size(1), 1u);
  EXPECT_EQ(here.tracer(0)->size(1), 0u);
}

TEST(Trace, MergeRefusesDamagedBytes) {
  Trace source(2, small(1, 1));
  put_span(source, 0, 0, Event::plan, 1, 2, 3);
  source.event("own");
  const std::vector<std::byte> good = source.serialize(0);
  Trace target(2, small(1, 1));
  for (size_t n = 0; n < good.size(); ++n) {
    EXPECT_THROW(target.merge(std::span(good).first(n)), Error) << n << " of " << good.size() << " bytes";
  }
  std::vector<std::byte> longer = good;
  longer.push_back(std::byte{0});
  EXPECT_THROW(target.merge(longer), Error);
  std::vector<std::byte> magic = good;
  magic[0] ^= std::byte{1};
  EXPECT_THROW(target.merge(magic), Error);
  EXPECT_EQ(target.tracer(0)->size(0), 0u) << "a refused merge must leave nothing behind";
  EXPECT_THROW(Trace(3, small(1, 1)).merge(good), Error);
  EXPECT_THROW(Trace(2, small(2, 1)).merge(good), Error);
}

TEST(Trace, WritesAFileAndNamesThePathThatItCannotWrite) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("switchyard_trace_" + std::to_string(getpid()) + ".json");
  Trace trace(1, small(1, 1));
  put_span(trace, 0, 0, Event::plan, 1, 2, 3);
  trace.write_chrome_json(path.string());
  std::ifstream in(path);
  const json doc = json::parse(in);
  EXPECT_EQ(only_phase(doc, "X").size(), 1u);
  std::filesystem::remove(path);
  try {
    trace.write_chrome_json("/nonexistent-folder/trace.json");
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::io);
    EXPECT_NE(std::string(e.what()).find("/nonexistent-folder/trace.json"), std::string::npos);
  }
}

}  // namespace
}  // namespace switchyard

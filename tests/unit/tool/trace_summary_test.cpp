// SPDX-License-Identifier: Apache-2.0
// The output of `switchyard trace` for a hand-written trace: gaps, waits by rank, the busiest links, and the cost of recording.
#include "tools/trace/summary.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "trace/tracer.hpp"

namespace switchyard::tool {
namespace {

using detail::Event;
using nlohmann::json;

/// Two ranks with one expert each. Rank 0 has three tokens: one for both experts, one for the second expert twice, and one for
/// no expert. Rank 1 has one token, for the first expert.
Scenario two_ranks() {
  Scenario s;
  s.world = 2;
  s.experts = 2;
  s.topk = 2;
  s.hidden = 64;
  s.routing.resize(2);
  for (Routing& r : s.routing) r.topk = 2, r.num_experts = 2;
  s.routing[0].num_tokens = 3;
  s.routing[0].topk_ids = {0, 1, 1, 1, -1, -1};
  s.routing[1].num_tokens = 1;
  s.routing[1].topk_ids = {0, -1};
  return s;
}

TraceVerbOptions options_for(const char* mode) {
  TraceVerbOptions o;
  o.run.mode = mode;
  o.run.hidden = 64;
  return o;
}

Trace two_workers(size_t events = 64) {
  TraceOptions t;
  t.num_blocks = 1;
  t.num_warps = 2;
  t.events_per_track = events;
  return Trace(2, t);
}

TEST(TraceSummary, TheLongestGapLiesInsideACall) {
  Trace trace = two_workers();
  detail::Tracer& r = *trace.tracer(0);
  r.span(detail::kHostTrack, Event::dispatch, 1'000, 11'000, 3);
  r.span(detail::kHostTrack, Event::combine, 50'000, 60'000, 3);  // the 39 us between the calls are not a gap
  r.span(0, Event::send_rows, 1'000, 3'000, 1);
  r.span(0, Event::wait_rows, 6'000, 11'000, 1);     // 3 us before it
  r.span(1, Event::send_rows, 1'000, 11'500, 1);     // extends beyond the call
  r.span(0, Event::pull_reduce, 49'500, 59'000, 1);  // begins before the call
  r.span(1, Event::pull_reduce, 50'000, 54'000, 1);
  r.span(1, Event::wait_pulled, 54'000, 55'000, 1);  // then 5 us until the end
  const json ranks = summary_json(options_for("normal"), two_ranks(), trace, {}).at("ranks");
  ASSERT_EQ(ranks.size(), 1u);
  const json& gap = ranks[0].at("longest_gap");
  EXPECT_DOUBLE_EQ(gap.at("us"), 5.0);
  EXPECT_EQ(gap.at("worker"), "block 0 warp 1");
  EXPECT_EQ(gap.at("call"), "combine");
  EXPECT_DOUBLE_EQ(gap.at("begins_us"), 5.0);
  EXPECT_EQ(gap.at("after"), "wait_pulled");
  EXPECT_EQ(gap.at("before"), "its end");
  // From 1 to 59 us, the workers are busy for 2 + 5 + 9.5 us and 10.5 + 5 us, of 58 us each.
  EXPECT_DOUBLE_EQ(ranks[0].at("window_us"), 58.0);
  EXPECT_NEAR(ranks[0].at("idle_share").get<double>(), 1 - 32.0 / (2 * 58.0), 1e-9);
}

/// Kernels differ in their number of warps: a warp that does not exist in a call is not idle during the call.
TEST(TraceSummary, AWorkerOfAnotherCallIsNotIdleInThisOne) {
  Trace trace = two_workers();
  detail::Tracer& r = *trace.tracer(0);
  r.span(detail::kHostTrack, Event::dispatch, 0, 100'000, 3);
  r.span(detail::kHostTrack, Event::combine, 110'000, 150'000, 3);
  r.span(0, Event::send_rows, 0, 97'000, 1);
  r.span(0, Event::pull_reduce, 111'000, 150'000, 1);
  r.span(1, Event::pull_reduce, 110'000, 144'000, 1);  // in the second call only
  const json ranks = summary_json(options_for("normal"), two_ranks(), trace, {}).at("ranks");
  const json& gap = ranks[0].at("longest_gap");
  EXPECT_DOUBLE_EQ(gap.at("us"), 6.0);
  EXPECT_EQ(gap.at("call"), "combine");
  EXPECT_EQ(gap.at("worker"), "block 0 warp 1");
  // The first worker is busy for 97 + 39 of 150 us, and the second (without the first call) for 34 of 50 us.
  EXPECT_NEAR(ranks[0].at("idle_share").get<double>(), 1 - (97.0 + 39 + 34) / (150 + 50), 1e-9);
  Trace none = two_workers();
  none.tracer(0)->span(detail::kHostTrack, Event::dispatch, 0, 100'000, 3);
  none.tracer(0)->span(0, Event::pull_reduce, 200'000, 201'000, 1);
  EXPECT_FALSE(summary_json(options_for("normal"), two_ranks(), none, {}).at("ranks")[0].contains("longest_gap"));
}

TEST(TraceSummary, CallsWhoseSpansWereForgottenHaveNoGap) {
  Trace trace = two_workers(2);
  detail::Tracer& r = *trace.tracer(0);
  r.span(detail::kHostTrack, Event::dispatch, 1'000, 11'000, 3);
  r.span(detail::kHostTrack, Event::dispatch, 20'000, 30'000, 3);
  for (const uint64_t begin : {1'000u, 18'000u, 22'000u}) r.span(0, Event::send_rows, begin, begin + 1'000, 1);
  ASSERT_EQ(trace.lost(), 1u);
  const json ranks = summary_json(options_for("normal"), two_ranks(), trace, {}).at("ranks");
  EXPECT_DOUBLE_EQ(ranks[0].at("longest_gap").at("us"), 7.0);  // from 23 to 30; the first call would give 10
}

TEST(TraceSummary, WaitsAreChargedToTheRankThatIsAwaited) {
  Trace trace = two_workers();
  trace.tracer(0)->span(0, Event::wait_rows, 1'000, 4'000, 1);
  trace.tracer(0)->span(1, Event::wait_rows, 1'000, 2'000, 0);   // its own rows
  trace.tracer(0)->span(1, Event::wait_rows, 2'000, 3'000, -1);  // not a wait
  trace.tracer(1)->span(0, Event::wait_rows, 1'000, 1'500, 0);
  const json ranks = summary_json(options_for("normal"), two_ranks(), trace, {}).at("ranks");
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_DOUBLE_EQ(ranks[0].at("awaited_us"), 0.5);
  EXPECT_DOUBLE_EQ(ranks[1].at("awaited_us"), 3.0);
}

TEST(TraceSummary, TheBusiestLinkOfEachDirectionCountsRowsAsTheyTravel) {
  const Trace trace = two_workers();
  const Scenario s = two_ranks();
  const auto links = [&](const TraceVerbOptions& o) { return summary_json(o, s, trace, {}).at("busiest_link"); };
  constexpr double kRowBytes = 64 * 2;
  json l = links(options_for("normal"));
  EXPECT_EQ(l["out"], (json{{"from", 0}, {"to", 1}, {"bytes", 2 * kRowBytes}, {"by", "routing"}}));
  EXPECT_EQ(l["back"], (json{{"from", 1}, {"to", 0}, {"bytes", 2 * kRowBytes}, {"by", "routing"}}));
  TraceVerbOptions fp8 = options_for("low_latency");
  fp8.run.quantize = "f32";
  l = links(fp8);
  EXPECT_EQ(l["out"]["bytes"], 2.0 * (64 + static_cast<double>(scale_row_bytes(64, ScaleKind::f32))));
  EXPECT_EQ(l["back"]["bytes"], 2 * kRowBytes);
  l = links(options_for("ledger"));
  EXPECT_EQ(l["out"]["bytes"], 0.0);
  EXPECT_EQ(l["back"]["bytes"], 2 * kRowBytes);
}

/// Two calls of each kind on two ranks, whose spans have byte counts that no routing of two_ranks() could produce.
Trace with_bytes(size_t events = 64) {
  Trace trace = two_workers(events);
  for (int rank = 0; rank < 2; ++rank) {
    detail::Tracer& r = *trace.tracer(rank);
    for (const uint64_t at : {1'000u, 41'000u}) {
      r.span(detail::kHostTrack, Event::dispatch, at, at + 10'000, 3);
      r.span(detail::kHostTrack, Event::combine, at + 20'000, at + 30'000, 3);
      r.span(0, Event::send_rows, at, at + 1'000, 1, rank == 0 ? 100 : 10);
      r.span(1, Event::ring_send, at + 2'000, at + 3'000, 1, 7);         // of the dispatch
      r.span(0, Event::ring_send, at + 21'000, at + 22'000, 1, 1);       // of the combine
      r.span(0, Event::pull_reduce, at + 23'000, at + 24'000, 1, 1000);  // from the other rank
      r.span(1, Event::return_rows, at + 23'000, at + 24'000, 1, rank == 0 ? 0 : 3000);
    }
  }
  return trace;
}

TEST(TraceSummary, OfTwoRanksTheTraceSaysWhatCrossedTheLink) {
  const json j = summary_json(options_for("normal"), two_ranks(), with_bytes(), {});
  EXPECT_EQ(j["busiest_link"]["out"], (json{{"from", 0}, {"to", 1}, {"bytes", 107.0}, {"by", "trace"}}));
  EXPECT_EQ(j["busiest_link"]["back"], (json{{"from", 1}, {"to", 0}, {"bytes", 4001.0}, {"by", "trace"}}));
  EXPECT_EQ(j["ranks"][0]["carried_bytes"], 2 * 1108.0);
  EXPECT_EQ(j["ranks"][1]["carried_bytes"], 2 * 4018.0);
  const json forgotten = summary_json(options_for("normal"), two_ranks(), with_bytes(4), {});
  EXPECT_EQ(forgotten["busiest_link"]["out"]["by"], "routing");
}

TEST(TraceSummary, AWrittenTraceSaysTheSame) {
  Trace trace = with_bytes();
  trace.tracer(1)->span(1, Event::wait_rows, 1'000, 1'500, 0);
  trace.tracer(1)->span(1, Event::exchange_counts, 1'500, 1'750, 64);  // its argument is in bytes, not rows
  trace.tracer(1)->span(0, Event::wait_rows, 42'500, 43'501, 0);       // with an arrow, whose marker is not a span
  trace.tracer(0)->span(0, static_cast<Event>(trace.event("my \"own\"", "things")), 50'000, 60'000, 5);
  const json run = summary_json(options_for("normal"), two_ranks(), trace, {});
  const json read = file_summary_json("x", trace_file_from(json::parse(trace.chrome_json())));
  EXPECT_EQ(read["busiest_link"], run["busiest_link"]);
  EXPECT_EQ(read["config"]["ranks"], 2);
  ASSERT_EQ(read["ranks"].size(), run["ranks"].size());
  for (size_t r = 0; r < 2; ++r) {
    for (const char* figure : {"window_us", "idle_share", "awaited_us", "carried_bytes"})
      EXPECT_NEAR(read["ranks"][r][figure].get<double>(), run["ranks"][r][figure].get<double>(), 1e-6) << figure;
    for (const char* word : {"worker", "call", "after", "before"})
      EXPECT_EQ(read["ranks"][r]["longest_gap"][word], run["ranks"][r]["longest_gap"][word]);
  }
  ASSERT_EQ(read["phases"].size(), run["phases"].size());
  for (const json& expected : run["phases"]) {
    const auto same = [&](const json& p) { return p["rank"] == expected["rank"] && p["phase"] == expected["phase"]; };
    const auto found = std::find_if(read["phases"].begin(), read["phases"].end(), same);
    ASSERT_NE(found, read["phases"].end()) << expected;
    for (const char* figure : {"count", "bytes", "category"}) EXPECT_EQ((*found)[figure], expected[figure]) << expected;
    for (const char* figure : {"total_us", "longest_us", "slowest_worker_us"})
      EXPECT_NEAR((*found)[figure].get<double>(), expected[figure].get<double>(), 1e-6) << expected;
  }
}

TEST(TraceSummary, ALayerInOneCallHasFiguresOfItsOwn) {
  Trace trace = two_workers();
  for (int rank = 0; rank < 2; ++rank) {
    detail::Tracer& r = *trace.tracer(rank);
    r.span(detail::kHostTrack, Event::layer, 0, 100'000, 3);
    r.span(0, Event::expert_up, 20'000, 50'000, 1);
    r.span(0, Event::expert_down, 50'000, 90'000, 1);
    r.span(1, Event::pull_rows, 10'000, 30'000, 1, rank == 0 ? 500 : 300);  // from the other rank
    r.span(1, Event::return_rows, 80'000, 100'000, 1, 2000);                // to the other rank
  }
  TraceVerbOptions options = options_for("layer");
  options.run.form = "fused";
  const json j = summary_json(options, two_ranks(), trace, {});
  EXPECT_EQ(j["config"]["form"], "fused");
  ASSERT_EQ(j["layers"].size(), 2u);
  EXPECT_DOUBLE_EQ(j["layers"][1]["hidden_share"], 0.5);
  EXPECT_DOUBLE_EQ(j["layers"][1]["before_up_us"], 20.0);
  EXPECT_EQ(j["busiest_link"]["out"], (json{{"from", 1}, {"to", 0}, {"bytes", 500.0}, {"by", "trace"}}));
  EXPECT_EQ(j["busiest_link"]["back"]["bytes"], 2000.0);
  EXPECT_EQ(file_summary_json("x", trace_file_from(json::parse(trace.chrome_json())))["layers"], j["layers"]);
  EXPECT_FALSE(summary_json(options_for("normal"), two_ranks(), with_bytes(), {}).contains("layers"));
}

TEST(TraceSummary, DamagedTracesAreRefused) {
  const json good = json::parse(with_bytes().chrome_json());
  EXPECT_NO_THROW((void)trace_file_from(good));
  for (const char* path : {"/otherData/world", "/otherData/lost_events", "/traceEvents", "/traceEvents/0/ph"}) {
    json bad = good;
    bad[json::json_pointer(path)] = nullptr;
    EXPECT_THROW((void)trace_file_from(bad), std::exception) << path;
  }
  for (const int world : {-1, 0, 1, 65}) {  // 1 is too small because there are spans of rank 1
    json bad = good;
    bad["otherData"]["world"] = world;
    EXPECT_THROW((void)trace_file_from(bad), std::exception) << world;
  }
}

TEST(TraceSummary, EventsThatCannotBeAreNamed) {
  const json good = json::parse(with_bytes().chrome_json());
  size_t at = 0;
  while (good["traceEvents"][at]["name"] != "send_rows") ++at;
  const auto refused = [&](const char* what, const json& value) {
    json bad = good;
    bad["traceEvents"][at][what] = value;
    try {
      (void)trace_file_from(bad);
    } catch (const BadEvent& e) {
      return std::string(e.what());
    }
    return std::string("not refused");
  };
  const std::string event = "traceEvents[" + std::to_string(at) + "] ('send_rows'): ";
  EXPECT_EQ(refused("dur", -0.001), event + "dur is -0.001; allowed: 0 to 9000000000000");
  EXPECT_EQ(refused("ts", -1), event + "ts is -1; allowed: 0 to 9000000000000");
  EXPECT_EQ(refused("ts", "1"), event + "ts is \"1\"; allowed: 0 to 9000000000000");
  for (const int64_t tid : {int64_t{INT32_MIN}, int64_t{-1}, int64_t{1} << 40})
    EXPECT_EQ(refused("tid", tid), event + "tid is " + std::to_string(tid) + "; allowed: 0 to 1048576");
  EXPECT_EQ(refused("pid", 2), event + "pid is 2; allowed: 0 to 1");
  EXPECT_EQ(refused("pid", 1), "not refused");
  json bad = good;
  for (json& e : bad["traceEvents"])
    if (e["name"] == "thread_name") e["args"]["name"] = "block 0 warp 2147483647";
  EXPECT_THROW((void)trace_file_from(bad), BadEvent);
}

TEST(TraceSummary, TheCostIsOfRoundsThatNothingDisturbed) {
  EXPECT_DOUBLE_EQ(TraceCost{}.share(), 0.0);
  const TraceCost cost{{140, 90, 150, 100, 130}, {112, 110, 300, 108, 111}};  // the second fastest of each: 110 against 100
  EXPECT_NEAR(cost.share(), 0.10, 1e-12);
  const json recorded = summary_json(options_for("normal"), two_ranks(), two_workers(), cost).at("recording");
  EXPECT_NEAR(recorded.at("cost_share").get<double>(), 0.10, 1e-12);
  EXPECT_FALSE(summary_json(options_for("normal"), two_ranks(), two_workers(), {}).contains("recording"));
}

}  // namespace
}  // namespace switchyard::tool

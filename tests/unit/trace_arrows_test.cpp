// SPDX-License-Identifier: Apache-2.0
// Where the arrows of a trace file begin and end, according to the rules of the programs that read it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "switchyard/trace.hpp"
#include "trace/tracer.hpp"

namespace switchyard {
namespace {

using detail::Event;
using nlohmann::json;

struct Slice {
  int rank = 0;
  int64_t begin = 0, end = 0;
  std::string name, category;
  int awaited = -1;
};

/// The innermost slices at both ends of an arrow, and the slice that encloses the second one.
struct Arrow {
  Slice from, to, around;
};

/// Converts a time in the file to nanoseconds, rounded as intended or truncated as by importers that multiply a double by 1000.
int64_t read_ns(const json& micros, bool cut) {
  const double ns = micros.get<double>() * 1000.0;
  return static_cast<int64_t>(cut ? ns : std::round(ns));
}

/// Processes events in time order; at equal times, slices come first, and longer slices precede shorter ones. A slice is open
/// until just before its end; each end of an arrow belongs to the innermost open slice on its track.
std::vector<Arrow> arrows_of(const json& document, bool cut) {
  std::vector<std::tuple<int64_t, int, int64_t, const json*>> order;  // time, slice first, longer first
  for (const json& e : document["traceEvents"]) {
    const auto kind = e["ph"].get<std::string>();
    if (kind != "X" && kind != "s" && kind != "f") continue;
    order.emplace_back(read_ns(e["ts"], cut), kind == "X" ? 0 : 1, kind == "X" ? -read_ns(e["dur"], cut) : 0, &e);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::tie(std::get<0>(a), std::get<1>(a), std::get<2>(a)) < std::tie(std::get<0>(b), std::get<1>(b), std::get<2>(b));
  });
  std::map<std::pair<int, int>, std::vector<Slice>> tracks;
  std::map<int, Slice> begun;
  std::vector<Arrow> arrows;
  for (const auto& [at, is_mark, minus_length, event] : order) {
    const json& e = *event;
    std::vector<Slice>& open = tracks[{e["pid"].get<int>(), e["tid"].get<int>()}];
    while (!open.empty() && open.back().end <= at) open.pop_back();
    if (!is_mark) {
      const int64_t end = at - minus_length;
      EXPECT_TRUE(open.empty() || end <= open.back().end) << e << " is not inside of " << open.back().name;
      open.push_back({e["pid"], at, end, e["name"], e["cat"], e["args"].value("rank", -1)});
      continue;
    }
    if (open.empty()) {
      ADD_FAILURE() << e << " lies in no slice";
      continue;
    }
    if (e["ph"] == "s") {
      begun[e["id"]] = open.back();
    } else if (begun.count(e["id"]) == 0) {
      ADD_FAILURE() << e << " ends an arrow that has not begun";
    } else {
      arrows.push_back({begun[e["id"]], open.back(), open.size() > 1 ? open[open.size() - 2] : open.back()});
    }
  }
  return arrows;
}

/// Every arrow must lead from a span of the rank being waited for, which is not itself a wait, to a marker in a wait or to the
/// wait itself. This must hold whether the reader takes the arrow's own beginning or the slice that begins first as the source.
void expect_arrows(const Trace& trace, size_t wanted, const std::string& from = "") {
  const json document = json::parse(trace.chrome_json());
  for (const bool cut : {false, true}) {
    SCOPED_TRACE(cut ? "times cut off" : "times exact");
    const std::vector<Arrow> arrows = arrows_of(document, cut);
    EXPECT_EQ(arrows.size(), wanted);
    for (const Arrow& a : arrows) {
      const Slice& wait = a.to.category == "flow" ? a.around : a.to;
      const std::string text = a.from.name + " to " + a.to.name + " in " + a.around.name + " at " + std::to_string(a.to.begin);
      EXPECT_EQ(wait.category, "wait") << text;
      EXPECT_NE(a.from.category, "wait") << text;
      EXPECT_NE(a.from.category, "flow") << text;
      EXPECT_EQ(a.from.rank, wait.awaited) << text;
      EXPECT_LT(a.from.begin, a.to.begin) << text << ": drawn the other way round";
      EXPECT_TRUE(from.empty() || a.from.name == from) << text;
    }
  }
}

Trace two_ranks() {
  TraceOptions o;
  o.num_warps = 2;
  o.events_per_track = 1 << 12;
  return Trace(2, o);
}
void put(Trace& trace, int rank, int track, Event event, uint64_t begin, uint64_t end, int64_t arg = 1) {
  trace.tracer(rank)->span(track, event, begin, end, arg);
}

TEST(TraceArrows, AWaitThatBeginsFirstIsNotTheSource) {
  Trace trace = two_ranks();
  put(trace, 0, 0, Event::wait_rows, 1'000, 5'000);
  put(trace, 1, 0, Event::send_rows, 2'000, 4'000);
  expect_arrows(trace, 1, "send_rows");
}

TEST(TraceArrows, SpansThatBeginWhereOthersEndAreNotTheirs) {
  Trace trace = two_ranks();
  put(trace, 1, 0, Event::send_rows, 1'000, 2'000);
  put(trace, 1, 0, Event::zero_padding, 2'000, 9'000);
  put(trace, 0, 0, Event::wait_rows, 1'500, 5'000);
  put(trace, 0, 0, Event::zero_padding, 5'000, 9'000);
  expect_arrows(trace, 1, "send_rows");
}

TEST(TraceArrows, SpansInsideOfTheSourceAreNotTheSource) {
  Trace trace = two_ranks();
  put(trace, 1, detail::kHostTrack, Event::dispatch, 1'000, 9'000);  // its signal is raised at its begin
  put(trace, 1, detail::kHostTrack, Event::plan, 1'000, 2'000);
  put(trace, 0, 0, Event::wait_entered, 500, 4'000);
  put(trace, 0, 1, Event::wait_entered, 500, 1'800);  // no time in between, so no arrow
  expect_arrows(trace, 1, "dispatch");
  Trace ends = two_ranks();
  put(ends, 1, 0, Event::send_rows, 1'000, 9'000);
  put(ends, 1, 0, Event::gate, 8'000, 9'000);
  put(ends, 1, 0, Event::gate, 5'000, 7'998);
  put(ends, 0, 0, Event::wait_rows, 500, 12'000);
  expect_arrows(ends, 1, "send_rows");
}

TEST(TraceArrows, WhatIsTooShortHasNone) {
  for (const uint64_t length : {0u, 1u, 2u, 3u, 4u, 5u}) {
    SCOPED_TRACE(length);
    Trace waits = two_ranks();
    put(waits, 1, 0, Event::send_rows, 1'000, 2'000);
    put(waits, 0, 0, Event::wait_rows, 5'001, 5'001 + length);
    expect_arrows(waits, length < 3 ? 0 : 1, "send_rows");
    Trace sends = two_ranks();
    put(sends, 1, 0, Event::send_rows, 1'001, 1'001 + length);
    put(sends, 0, 0, Event::wait_rows, 500, 5'000);
    expect_arrows(sends, length < 3 ? 0 : 1, "send_rows");
  }
}

TEST(TraceArrows, MarkersAreNoSpansOfTheTrace) {
  Trace trace = two_ranks();
  put(trace, 1, 0, Event::send_rows, 1'000, 2'000);
  put(trace, 0, 0, Event::wait_rows, 1'500, 5'000);
  EXPECT_EQ(trace.slices().size(), 2u);
  EXPECT_EQ(trace.summary().size(), 2u);
  const auto slices = [](const std::string& text) {
    const json events = json::parse(text)["traceEvents"];
    return std::count_if(events.begin(), events.end(), [](const json& e) { return e["ph"] == "X"; });
  };
  EXPECT_EQ(slices(trace.chrome_json()), 3);
  EXPECT_EQ(slices(trace.chrome_json(false)), 2);
}

/// Two ranks whose workers have consecutive spans of any length, without a gap of even a nanosecond.
TEST(TraceArrows, OfManySpansAllLeadFromSendsToWaits) {
  std::mt19937 random(1);
  Trace trace = two_ranks();
  size_t waits = 0;
  for (int rank = 0; rank < 2; ++rank) {
    for (int track = 0; track < 2; ++track) {
      uint64_t now = 1'000;
      for (int i = 0; i < 1'000; ++i) {
        const uint64_t end = now + 7 + random() % 20'000;
        const bool sends = i == 0 || random() % 2 == 0;
        put(trace, rank, track, sends ? Event::send_rows : Event::wait_rows, now, end, sends ? 1 : 1 - rank);
        waits += !sends;
        now = end;
      }
    }
  }
  const std::vector<TraceSlice> all = trace.slices();
  std::map<int, double> first_sent;
  for (const TraceSlice& s : all)
    if (s.name == "send_rows") {
      const double end = s.begin_us + s.duration_us;
      first_sent[s.rank] = std::min(first_sent.try_emplace(s.rank, end).first->second, end);
    }
  for (const TraceSlice& s : all)
    if (s.name == "wait_rows" && s.begin_us + s.duration_us < first_sent[1 - s.rank] + 0.0045) --waits;
  EXPECT_GT(waits, 1'500u);
  expect_arrows(trace, waits, "send_rows");
}

}  // namespace
}  // namespace switchyard

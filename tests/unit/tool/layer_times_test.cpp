// SPDX-License-Identifier: Apache-2.0
// The figures computed from traces of a fused layer, for hand-written traces: the shares of the warps that multiply, and the
// amount of communication that they hide.
#include "tools/layer/layer_times.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "trace/tracer.hpp"

namespace switchyard::tool {
namespace {

using detail::Event;

/// Creates a slice, by default of rank 0; if `track` is -1, the slice is a call.
TraceSlice span(const char* name, int track, double begin, double end, int rank = 0) {
  const std::string text = name;
  const char* const category = text == "layer"                 ? "call"
                               : text.rfind("wait_", 0) == 0   ? "wait"
                               : text.rfind("expert_", 0) == 0 ? "compute"
                                                               : "move";
  return {rank, track, name, category, begin, end - begin, 0, 0};
}

/// Two warps that multiply (tracks 0 and 1), a loader (track 2) and a mover (track 3).
std::vector<TraceSlice> one_call(double at = 0) {
  return {
      span("layer", -1, at, at + 100),           span("expert_up", 0, at + 20, at + 40),
      span("expert_down", 0, at + 50, at + 70),  span("wait_returned", 0, at + 75, at + 80, 0),
      span("sum_returned", 0, at + 80, at + 90), span("expert_up", 1, at + 25, at + 45),
      span("expert_down", 1, at + 45, at + 60),  span("wait_tiles", 2, at + 30, at + 50),  // on a worker that does not multiply
      span("pull_rows", 3, at + 10, at + 30),                                              // 10 of 20 hidden by products
      span("return_rows", 3, at + 60, at + 80)};
}

TEST(LayerTimes, SharesAndEdgesOfACall) {
  const std::vector<LayerTimes> all = layer_times(one_call());
  ASSERT_EQ(all.size(), 1u);
  const LayerTimes& t = all[0];
  EXPECT_EQ(t.rank, 0);
  EXPECT_EQ(t.calls, 1);
  EXPECT_EQ(t.workers, 2);
  EXPECT_DOUBLE_EQ(t.call_us, 100);
  EXPECT_DOUBLE_EQ(t.before_up_us, 20);
  EXPECT_DOUBLE_EQ(t.after_down_us, 30);
  EXPECT_DOUBLE_EQ(t.up_share, 40.0 / 200);
  EXPECT_DOUBLE_EQ(t.down_share, 35.0 / 200);
  EXPECT_DOUBLE_EQ(t.sum_share, 10.0 / 200);
  EXPECT_DOUBLE_EQ(t.wait_share, 5.0 / 200);
  EXPECT_DOUBLE_EQ(t.product_share(), 75.0 / 200);
  EXPECT_DOUBLE_EQ(t.communication_us, 40);
  EXPECT_DOUBLE_EQ(t.hidden_us, 10 + 10);  // products run from 20 to 70
  EXPECT_DOUBLE_EQ(t.hidden_share(), 0.5);
}

TEST(LayerTimes, AreMeansOverCalls) {
  std::vector<TraceSlice> slices = one_call();
  for (const TraceSlice& s : one_call(1000)) slices.push_back(s);
  const LayerTimes one = layer_times(one_call())[0], two = layer_times(slices)[0];
  EXPECT_EQ(two.calls, 2);
  for (double LayerTimes::*figure : {&LayerTimes::call_us, &LayerTimes::before_up_us, &LayerTimes::after_down_us,
                                     &LayerTimes::up_share, &LayerTimes::down_share, &LayerTimes::sum_share,
                                     &LayerTimes::wait_share, &LayerTimes::communication_us, &LayerTimes::hidden_us})
    EXPECT_DOUBLE_EQ(two.*figure, one.*figure);
}

TEST(LayerTimes, LeaveOutTheFirstCalls) {
  std::vector<TraceSlice> slices{span("layer", -1, 0, 500), span("expert_up", 4, 300, 400), span("expert_down", 4, 400, 450),
                                 span("pull_rows", 5, 100, 300)};
  for (const TraceSlice& s : one_call(1000)) slices.push_back(s);
  slices.push_back(span("layer", -1, 0, 700, 1));  // the only call on another rank
  const std::vector<LayerTimes> all = layer_times(slices, 1);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].rank, 0);
  EXPECT_EQ(all[0].calls, 1);
  EXPECT_EQ(all[0].workers, 2);  // without the worker of the first call
  EXPECT_DOUBLE_EQ(all[0].call_us, 100);
  EXPECT_DOUBLE_EQ(all[0].before_up_us, 20);
  EXPECT_DOUBLE_EQ(all[0].communication_us, 40);
  EXPECT_EQ(layer_times(slices).size(), 2u);
  EXPECT_TRUE(layer_times(slices, 2).empty());
}

TEST(LayerTimes, WhatLiesOutsideACallDoesNotCount) {
  std::vector<TraceSlice> slices = one_call(100);
  slices.push_back(span("expert_up", 0, 0, 50));       // before the call
  slices.push_back(span("expert_down", 1, 190, 240));  // extends beyond it
  slices.push_back(span("pull_rows", 3, 195, 300));    // extends beyond it too
  slices.push_back(span("return_rows", 3, 400, 500));  // after it
  slices.push_back(span("expert_up", 5, 400, 500));    // on a worker that has no other work
  const LayerTimes t = layer_times(slices)[0];
  EXPECT_EQ(t.calls, 1);
  EXPECT_EQ(t.workers, 2);
  EXPECT_DOUBLE_EQ(t.before_up_us, 20);
  EXPECT_DOUBLE_EQ(t.after_down_us, 0);
  EXPECT_DOUBLE_EQ(t.communication_us, 45);
  EXPECT_DOUBLE_EQ(t.hidden_us, 20 + 5);
}

TEST(LayerTimes, RanksAreApart) {
  std::vector<TraceSlice> slices = one_call();
  slices.push_back(span("layer", -1, 0, 10, 1));  // a rank that received no routes
  slices.push_back(span("sum_returned", 0, 4, 6, 1));
  slices.push_back(span("return_rows", 3, 2, 4, 1));
  slices.push_back(span("dispatch", -1, 0, 10, 2));  // not a layer
  slices.push_back(span("pull_rows", 3, 0, 10, 2));
  const std::vector<LayerTimes> all = layer_times(slices);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_DOUBLE_EQ(all[0].hidden_share(), 0.5);
  EXPECT_EQ(all[1].rank, 1);
  EXPECT_DOUBLE_EQ(all[1].sum_share, 0.2);
  EXPECT_DOUBLE_EQ(all[1].before_up_us, 0);
  EXPECT_DOUBLE_EQ(all[1].communication_us, 2);
  EXPECT_DOUBLE_EQ(all[1].hidden_share(), 0);
}

TEST(LayerTimes, NothingIsMadeOfOtherCalls) {
  EXPECT_TRUE(layer_times({}).empty());
  EXPECT_TRUE(layer_times({span("dispatch", -1, 0, 10), span("send_rows", 0, 0, 10)}).empty());
  EXPECT_EQ(layer_times_text({}), "");
  const LayerTimes empty = layer_times({span("layer", -1, 0, 10)})[0];  // a call that moved nothing
  EXPECT_EQ(empty.workers, 0);
  EXPECT_DOUBLE_EQ(empty.up_share, 0);
  EXPECT_DOUBLE_EQ(empty.hidden_share(), 0);
}

TEST(LayerTimes, AreToldAsTextAndAsJson) {
  const std::vector<LayerTimes> all = layer_times(one_call());
  const nlohmann::json encoded = layer_times_json(all);
  ASSERT_EQ(encoded.size(), 1u);
  EXPECT_EQ(encoded[0].at("workers"), 2);
  EXPECT_DOUBLE_EQ(encoded[0].at("hidden_share").get<double>(), 0.5);
  EXPECT_DOUBLE_EQ(encoded[0].at("up_share").get<double>(), 0.2);
  const LayerTimes read = layer_times_from(encoded[0]);
  EXPECT_EQ(layer_times_json({read}), encoded);
  const std::string text = layer_times_text(all);
  EXPECT_NE(text.find("50.0 %"), std::string::npos) << text;
  EXPECT_NE(text.find("17.5 %"), std::string::npos) << text;
}

/// The names are those in the event table, which appear in traces.
TEST(LayerTimes, KnowTheEventsOfATrace) {
  TraceOptions options;
  options.num_warps = 2;
  Trace trace(1, options);
  detail::Tracer& r = *trace.tracer(0);
  r.span(detail::kHostTrack, Event::layer, 0, 100'000, 3);
  r.span(0, Event::expert_up, 10'000, 30'000, 1);
  r.span(0, Event::expert_down, 30'000, 60'000, 1);
  r.span(0, Event::wait_returned, 60'000, 70'000, 0);
  r.span(0, Event::sum_returned, 70'000, 80'000, 2);
  r.span(1, Event::pull_rows, 0, 20'000, 1);
  r.span(1, Event::return_rows, 50'000, 70'000, 1);
  const LayerTimes t = layer_times(trace.slices())[0];
  EXPECT_EQ(t.workers, 1);
  EXPECT_DOUBLE_EQ(t.up_share, 0.2);
  EXPECT_DOUBLE_EQ(t.down_share, 0.3);
  EXPECT_DOUBLE_EQ(t.wait_share, 0.1);
  EXPECT_DOUBLE_EQ(t.sum_share, 0.1);
  EXPECT_DOUBLE_EQ(t.hidden_share(), 0.5);
}

}  // namespace
}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// Times of the steps of a separate layer: from hand-written traces, and from layers on the CPU.
#include "tools/layer/layer_steps.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/layer/layer_rank.hpp"
#include "tools/layer/layer_times.hpp"
#include "tools/run/ranks.hpp"
#include "trace/tracer.hpp"
#include "unit/tool/small_layer.hpp"

namespace switchyard::tool {
namespace {

TraceSlice step_span(const char* name, int track, double begin_us, double end_us, int rank = 0) {
  return {rank, track, name, "", begin_us, end_us - begin_us, 0, 0};
}
std::vector<double> microseconds(const LayerSteps& s) {
  std::vector<double> all{s.layer, s.dispatch, s.up, s.down, s.experts, s.combine};
  for (double& one : all) one = std::round(one * 1e9) / 1e3;
  return all;
}
using Microseconds = std::vector<double>;

TEST(LayerSteps, AreSpansOfTheCallTrack) {
  const std::vector<TraceSlice> slices{
      step_span("combine", -1, 0, 5),  // of a call that began before the recording
      step_span("barrier", -1, 8, 9),         step_span("dispatch", -1, 10, 30),     step_span("plan", -1, 10, 12),
      step_span("expert_up", -1, 32, 62),     step_span("expert_down", -1, 63, 78),  step_span("combine", -1, 80, 90),
      step_span("expert_up", 3, 40, 1000),    step_span("dispatch", 0, 11, 29),  // of workers
      step_span("dispatch", -1, 100, 140),    step_span("expert_mlp", -1, 141, 148), step_span("combine", -1, 150, 155),
      step_span("dispatch", -1, 200, 203),                                          // no other step
      step_span("dispatch", -1, 20, 21, 1),   step_span("combine", -1, 25, 27, 1),  // without experts
      step_span("dispatch", -1, 300, 302, 1), step_span("combine", -1, 310, 311, 1), step_span("combine", -1, 312, 314, 1)};
  const std::vector<LayerSteps> first = layer_steps(slices, 0), second = layer_steps(slices, 1);
  ASSERT_EQ(first.size(), 3u);
  EXPECT_EQ(microseconds(first[0]), (Microseconds{80, 20, 30, 15, 45, 10}));
  EXPECT_EQ(microseconds(first[1]), (Microseconds{55, 40, 0, 0, 7, 5}));
  EXPECT_EQ(microseconds(first[2]), (Microseconds{3, 3, 0, 0, 0, 0}));
  ASSERT_EQ(second.size(), 2u);
  EXPECT_EQ(microseconds(second[0]), (Microseconds{7, 1, 0, 0, 0, 2}));
  EXPECT_EQ(microseconds(second[1]), (Microseconds{14, 2, 0, 0, 0, 3})) << "two spans of a step";
  EXPECT_TRUE(layer_steps(slices, 2).empty());
  EXPECT_TRUE(layer_steps({}, 0).empty());
}

TEST(LayerSteps, HaveTheNamesOfEvents) {
  using detail::Event;
  Trace trace(1);
  int64_t at = 0;
  for (const Event event : {Event::dispatch, Event::expert_mlp, Event::expert_up, Event::expert_down, Event::combine}) {
    trace.tracer(0)->span(detail::kHostTrack, event, static_cast<uint64_t>(at), static_cast<uint64_t>(at + 10'000), 1);
    at += 20'000;
  }
  const std::vector<LayerSteps> calls = layer_steps(trace.slices(), 0);
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(microseconds(calls[0]), (Microseconds{90, 10, 10, 10, 30, 10}));
}

TEST(LayerSteps, AreArraysByKey) {
  nlohmann::json out, parts;
  for (const double scale : {1, 2}) {
    const std::vector<LayerSteps> one{{10 * scale, 1 * scale, 2 * scale, 3 * scale, 4 * scale, 7 * scale}};
    add_steps(out, one, false);
    add_steps(parts, one, true);
  }
  EXPECT_EQ(
      out, (nlohmann::json{
               {"recorded_layer", {10.0, 20.0}}, {"dispatch", {1.0, 2.0}}, {"combine", {2.0, 4.0}}, {"experts", {7.0, 14.0}}}));
  EXPECT_EQ(parts.at("up"), (nlohmann::json{3.0, 6.0}));
  EXPECT_EQ(parts.at("down"), (nlohmann::json{4.0, 8.0}));
  for (const auto& [key, values] : parts.items()) {
    const std::vector<const char*> keys = step_keys();
    EXPECT_TRUE(std::find(keys.begin(), keys.end(), key) != keys.end()) << key;
  }
}

/// Runs `body` on two ranks, each with a layer, a clock and trace options.
template <class Body>
std::vector<nlohmann::json> on_two_ranks(MoeExchange exchange, const Body& body) {
  const LayerSpec spec = small_layer(exchange);
  RankJob job;
  job.world = spec.scenario.world;
  job.group.num_warps = 2;
  job.group.heap_bytes = layer_heap_bytes(spec);
  return run_ranks(job, [&](Group& group, RankLink&) {
    const std::unique_ptr<Clock> clock = make_host_clock(group);
    LayerRank rank(spec, group, clock->device());
    rank.prepare(0);
    return body(group, *clock, rank, layer_trace_options(Backend::cpu, 0, 1, 2));
  });
}

TEST(LayerSteps, OccurOncePerCall) {
  constexpr int64_t kCalls = 5;
  for (const MoeExchange exchange : {MoeExchange::normal, MoeExchange::low_latency}) {
    const auto ranks = on_two_ranks(exchange, [&](Group& group, Clock& clock, LayerRank& rank, const TraceOptions& options) {
      Trace trace(group.size(), options);
      const std::vector<TraceSlice> slices =
          recorded(group, clock.device(), trace, [&] { (void)clock.time([&] { rank.layer(); }, 0, kCalls); });
      nlohmann::json out{{"counts", {{"dispatch", 0}, {"expert_mlp", 0}, {"combine", 0}}}, {"within", nlohmann::json::array()}};
      for (const TraceSlice& s : slices)
        if (s.track < 0 && out["counts"].contains(s.name)) out["counts"][s.name] = out["counts"][s.name].get<int>() + 1;
      for (const LayerSteps& s : layer_steps(slices, group.rank()))
        out["within"].push_back(s.dispatch > 0 && s.experts > 0 && s.combine > 0 &&
                                s.dispatch + s.experts + s.combine <= s.layer + 1e-9);
      return out;
    });
    for (const nlohmann::json& rank : ranks) {
      EXPECT_EQ(rank["counts"], (nlohmann::json{{"dispatch", kCalls}, {"expert_mlp", kCalls}, {"combine", kCalls}}))
          << to_string(exchange);
      EXPECT_EQ(rank["within"], nlohmann::json(std::vector<bool>(kCalls, true))) << to_string(exchange);
    }
  }
}

TEST(LayerSteps, AreRecordedInPartsWithoutTheFirstCallOfEach) {
  constexpr int64_t kCalls = 20;  // more than one recording holds
  const auto ranks =
      on_two_ranks(MoeExchange::normal, [&](Group& group, Clock& clock, LayerRank& rank, const TraceOptions& options) {
        int64_t made = 0;
        const std::vector<LayerSteps> steps = record_steps(group, clock, options, kCalls, [&] { rank.layer(), ++made; });
        std::string failure;
        try {
          (void)record_steps(group, clock, options, 2, [] {});
        } catch (const Error& e) {
          failure = e.what();
        }
        return nlohmann::json{steps.size(), made, failure};
      });
  for (const nlohmann::json& rank : ranks) {
    EXPECT_EQ(rank[0], kCalls);
    EXPECT_EQ(rank[1], kCalls + 2);
    EXPECT_NE(rank[2].get<std::string>().find("0 calls of a layer recorded, 3 made"), std::string::npos) << rank[2];
  }
}

}  // namespace
}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// The measurements that `switchyard bench` would make: its points, and the GPU options that it accepts. This can be checked
// without a GPU.
#include "tools/bench/points.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <utility>

#include "switchyard/status.hpp"
#include "switchyard/tuning.hpp"
#include "tools/bench/driver.hpp"
#include "tools/bench/layer_point.hpp"
#include "tools/cli/verb.hpp"
#include "tools/device/rank_device.hpp"
#include "tools/tune/file.hpp"

namespace switchyard::tool {
namespace {

TEST(BenchPoints, IterationsOnGpusAreEnoughForAP99) {
  for (const char* mode : {"normal", "low_latency", "flat", "layer"}) {
    BenchOptions o;
    o.mode = mode;
    EXPECT_EQ(bench_points(o).front().iterations, 40) << mode;
    o.backend = "cuda";
    EXPECT_EQ(bench_points(o).front().iterations, 200) << mode;
  }
}

TEST(BenchPoints, EveryVariantOfLowLatencyCanBeSwept) {
  BenchOptions o;
  o.mode = "low_latency";
  o.sweep = {"quantize=f32,ue8m0", "scale-order=row_major,column_major", "sending=per_rank,per_route"};
  const std::vector<BenchOptions> points = bench_points(o);
  ASSERT_EQ(points.size(), 8u);
  for (size_t i = 0; i < points.size(); ++i) {
    EXPECT_EQ(points[i].quantize, i < 4 ? "f32" : "ue8m0") << i;
    EXPECT_EQ(points[i].scale_order, i % 4 < 2 ? "row_major" : "column_major") << i;
    EXPECT_EQ(points[i].sending, i % 2 == 0 ? "per_rank" : "per_route") << i;
  }
  EXPECT_EQ(points.back().swept, (std::vector<std::string>{"quantize", "scale-order", "sending"}));
}

TEST(BenchPoints, ALayerHasTheSettingsOfAMoeLayer) {
  BenchOptions o;
  o.mode = "layer";
  o.order = "per_route";
  o.sweep = {"experts=64,128", "intermediate=512,2048"};
  const std::vector<BenchOptions> points = bench_points(o);
  ASSERT_EQ(points.size(), 4u);
  EXPECT_EQ(points[1].experts, 64);
  EXPECT_EQ(points[1].intermediate, 2048);
  EXPECT_EQ(&exchange_of(o), &kNormal);
  o.exchange = "low_latency";
  EXPECT_EQ(&exchange_of(o), &kLowLatency);
  for (const char* exchange : {"normal", "low_latency"}) {
    o.exchange = exchange;
    EXPECT_NO_THROW(bench_points(o)) << exchange;
    const auto refused = [&](const char* text, auto set) {
      BenchOptions other = o;
      set(other);
      try {
        bench_points(other);
        ADD_FAILURE() << text << exchange;
      } catch (const UsageError& e) {
        EXPECT_STREQ(e.what(), text) << exchange;
      }
    };
    refused("--alignment: given with --mode layer; it belongs to --mode normal", [](auto& l) { l.alignment = 128; });
    refused("--pieces: given with --mode layer; it belongs to --mode low_latency and flat", [](auto& l) { l.pieces = 2; });
    refused("--sending: given with --mode layer; it belongs to --mode low_latency and flat",
            [](auto& l) { l.sending = "per_route"; });
    refused("--scale-order: given with --mode layer; it belongs to --mode low_latency",
            [](auto& l) { l.scale_order = "column_major"; });
  }
}

TEST(BenchPoints, ALayerCanBeQuantisedOnGpus) {
  BenchOptions o;
  o.mode = "layer";
  o.backend = "cuda";
  o.sweep = {"quantize=none,f32,ue8m0"};
  const std::vector<BenchOptions> points = bench_points(o);
  ASSERT_EQ(points.size(), 3u);
  for (const BenchOptions& point : points) EXPECT_NO_THROW(check_words(point));
  o.sweep.clear();
  o.dtype = "fp8";
  EXPECT_THROW(check_words(o), UsageError) << "tokens are bf16";
  o.dtype = "bf16";
  o.quantize = "f32";
  o.backend = "cpu";
  EXPECT_THROW(check_words(o), UsageError) << "experts on the CPU are bf16";
}

TEST(BenchPoints, ALayerHasScalesPerChannelWhereTheLibraryDoes) {
  BenchOptions good;
  good.mode = "layer";
  good.backend = "cuda";
  good.quantize = "f32";
  good.sweep = {"scaling=per_channel,group_channel", "intermediate-scaling=per_group,fixed,per_row"};
  const std::vector<BenchOptions> points = bench_points(good);
  ASSERT_EQ(points.size(), 6u);
  for (const BenchOptions& point : points) EXPECT_NO_THROW(check_scaling(point));
  const auto refused = [&](const char* scaling, auto set) {
    BenchOptions o = good;
    o.scaling = scaling;
    set(o);
    try {
      check_scaling(o);
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const auto nothing = [](BenchOptions&) {};
  EXPECT_EQ(refused("block", nothing) + refused("per_channel", nothing) + refused("group_channel", nothing), "");
  const auto expect = [&](const char* scaling, const char* text, auto set) {
    EXPECT_NE(refused(scaling, set).find(text), std::string::npos) << refused(scaling, set);
  };
  expect("block", "--scaling per_channel or group_channel", [](auto& o) { o.intermediate_scaling = "per_row"; });
  expect("group_channel", "given with --quantize ue8m0", [](auto& o) { o.quantize = "ue8m0"; });
  expect("per_channel", "given with bf16 experts", [](auto& o) { o.quantize = "none"; });
  expect("per_channel", "given with --accumulate fast", [](auto& o) { o.accumulate = "fast"; });
  expect("per_channel", "given with --exchange low_latency", [](auto& o) { o.exchange = "low_latency"; });
  EXPECT_EQ(refused("per_channel", [](auto& o) { o.spare_slots = 2, o.sms = 8; }), "");
  EXPECT_EQ(refused("group_channel", [](auto& o) { o.exchange = "low_latency", o.spare_slots = 2, o.sms = 8; }), "");
}

TEST(BenchPoints, ALayerHasTheFormsOfTheLibrary) {
  BenchOptions o;
  o.mode = "layer";
  o.quantize = "f32";
  o.ranks = 2;
  o.tokens = 8;
  o.hidden = 128;
  o.intermediate = 128;
  o.experts = 4;
  o.topk = 2;
  o.sms = 12;
  o.backend = "cuda";
  const LayerSpec block = make_layer_point(o).spec;
  EXPECT_TRUE(block.separate && block.fused && block.fused_per_rank);
  EXPECT_EQ(block.sms, 12);
  o.scaling = "per_channel";
  const LayerSpec channel = make_layer_point(o).spec;
  EXPECT_TRUE(channel.separate);
  EXPECT_FALSE(channel.fused) << "the library has no fused form";
  EXPECT_EQ(channel.arithmetic.scaling, ScaleGranularity::per_channel);
  o.scaling = "group_channel";
  o.exchange = "low_latency";
  const LayerSpec decode = make_layer_point(o).spec;
  EXPECT_EQ(decode.exchange, MoeExchange::low_latency);
  EXPECT_FALSE(decode.fused);
}

TEST(BenchPoints, GpusTakeRingsAndTheirSettings) {
  BenchOptions o;
  o.backend = "cuda";
  o.staging = "ring";
  o.slots = 8;
  o.send_chunk = 4;
  o.channels = 2;
  o = bench_points(o).front();
  o.ranks = 2;
  o.tokens = 16;
  o.hidden = 64;
  o.sms = o.combine_sms = 4;
  if (!built_with_cuda()) {
    EXPECT_THROW(make_bench_case(kNormal, Backend::cuda), UsageError);
    return;
  }
  const std::unique_ptr<BenchCase> normal = make_bench_case(kNormal, Backend::cuda);
  EXPECT_NO_THROW(normal->check(o));
  o.slots = 4;  // fewer than the number of choices of a token
  EXPECT_THROW(normal->check(o), Error);
  o.staging = "direct";  // with direct staging, slots are not used
  EXPECT_NO_THROW(normal->check(o));
}

/// The library's choice for a call that specifies no number of multiprocessors, with the built-in tuning and for a shape whose
/// entry specifies more.
TEST(BenchPoints, DispatchesThatQuantiseHaveTheMultiprocessorsThatTheLibraryGivesThem) {
  const auto chosen = [](const char* mode, const char* layout, const char* quantize, const char* staging = "direct") {
    BenchOptions o;
    o.backend = "cuda";
    o.mode = mode;
    o.layout = layout;
    o.quantize = quantize;
    o.staging = staging;
    o.ranks = 2;
    o.tokens = 4096;
    choose_sms(o, "NVIDIA H200", 132);
    return std::pair(o.sms, o.combine_sms);
  };
  using Sms = std::pair<int64_t, int64_t>;
  unsetenv("SWITCHYARD_TUNING");
  EXPECT_EQ(chosen("normal", "rank_major", "none"), (Sms{16, 48}));
  EXPECT_EQ(chosen("normal", "rank_major", "f32"), (Sms{64, 48}));
  EXPECT_EQ(chosen("normal", "expert_major", "none"), (Sms{48, 112}));
  EXPECT_EQ(chosen("normal", "expert_major", "ue8m0"), (Sms{64, 112}));
  for (const char* quantize : {"none", "f32"}) EXPECT_EQ(chosen("normal", "rank_major", quantize, "ring"), (Sms{24, 24}));
  TuningOverride file;
  file.set({{{"NVIDIA H200", TuningMode::normal, 2, 7168, 4096}, {.dispatch_sms = 20, .quantized_dispatch_sms = 96}}});
  EXPECT_EQ(chosen("normal", "rank_major", "none"), (Sms{20, 24}));
  EXPECT_EQ(chosen("normal", "rank_major", "f32"), (Sms{96, 24}));
}

}  // namespace
}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// Settings of a MoeLayer with fp8 scales per channel: errors, and memory.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "harness/outcome.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {
namespace {

using harness::expect_text;
using harness::outcome_of;

constexpr float kScale = 1;
constexpr const char* kGiven =
    "MoeLayerConfig::intermediate_scale = a scale: must be null unless intermediate_scaling is fixed";

MoeLayerConfig scaled(ScaleGranularity scaling) {
  MoeLayerConfig c;
  c.hidden = 32;
  c.intermediate = 16;
  c.num_experts = 4;
  c.topk = 2;
  c.max_tokens = 8;
  c.dtype = DType::fp8_e4m3;
  c.storage = WeightStorage::view;
  c.exchange = MoeExchange::normal;
  c.scaling = scaling;
  return c;
}

TEST(MoeLayerScaling, ErrorsOfScalesPerChannelNameTheField) {
  const auto wrong = [](const char* text, ScaleGranularity scaling, const std::function<void(MoeLayerConfig&)>& change,
                        ErrorCode code = ErrorCode::invalid_argument) {
    MoeLayerConfig c = scaled(scaling);
    change(c);
    expect_text(outcome_of([&] { (void)MoeLayer::memory_required(c, 2, Backend::cuda); }), code, text);
  };
  for (const auto scaling : {ScaleGranularity::per_channel, ScaleGranularity::group_channel}) {
    const std::string name = std::string("MoeLayerConfig::scaling = ") + to_string(scaling);
    const std::string only = name + ": must be block, but for fp8_e4m3 in the separate form";
    wrong(
        only.c_str(), scaling, [](auto& c) { c.dtype = DType::bf16; }, ErrorCode::unsupported);
    wrong(
        only.c_str(), scaling, [](auto& c) { c.form = MoeForm::fused; }, ErrorCode::unsupported);
    wrong("MoeLayerConfig::accumulate = fast", scaling, [](auto& c) { c.accumulate = Accumulate::fast; });
    wrong("MoeLayerConfig::row_scales = ue8m0", scaling, [](auto& c) { c.row_scales = ScaleKind::ue8m0; });
    wrong("MoeLayerConfig::weight_scales = ue8m0", scaling, [](auto& c) { c.weight_scales = ScaleKind::ue8m0; });
  }
  wrong(
      "MoeLayerConfig::scaling = per_channel: must be block or group_channel for low_latency", ScaleGranularity::per_channel,
      [](auto& c) { c.exchange = MoeExchange::low_latency; }, ErrorCode::unsupported);
  wrong("MoeLayerConfig::intermediate_scaling = per_row: must be per_group if scaling is block", ScaleGranularity::block,
        [](auto& c) { c.intermediate_scaling = OutputScaling::per_row; });
  const auto give = [](auto& c) { c.intermediate_scale = &kScale; };
  for (const auto scaling : {ScaleGranularity::block, ScaleGranularity::per_channel, ScaleGranularity::group_channel})
    wrong(kGiven, scaling, give);
  wrong(kGiven, ScaleGranularity::block, [&](auto& c) {
    give(c);
    c.form = MoeForm::fused;
  });
  wrong(kGiven, ScaleGranularity::block, [&](auto& c) {
    give(c);
    c.dtype = DType::bf16;
  });
}

/// Given on one rank only, also to layers that have no such scale; with_weights() refuses it too.
TEST(MoeLayerScaling, AScaleThatNothingReadsIsRefused) {
  for (const MoeForm form : {MoeForm::separate, MoeForm::fused}) {
    MoeLayerConfig c = scaled(ScaleGranularity::block);
    c.dtype = DType::bf16;
    c.form = form;
    const size_t bytes = 2 * MoeLayer::heap_bytes(c, 2);
    const std::vector<uint16_t> weights(2 * 2 * 16 * 32);
    const auto found = harness::outcomes(2, harness::options_with(std::chrono::seconds(20), bytes), [&](Group& group) {
      MoeLayerConfig other = c;
      if (group.rank() == 1) other.intermediate_scale = &kScale;
      const harness::Outcome end = outcome_of([&] { MoeLayer(group, other, weights.data(), weights.data()); });
      expect_text(end, ErrorCode::invalid_argument, "MoeLayer, rank 1: " + std::string(kGiven));
      const MoeLayer layer(group, c, weights.data(), weights.data());
      MoeWeights more{weights.data(), weights.data()};
      (void)layer.with_weights(more);
      more.intermediate_scale = &kScale;
      expect_text(outcome_of([&] { (void)layer.with_weights(more); }), ErrorCode::invalid_argument,
                  "MoeLayer::with_weights: intermediate_scale is given");
      group.barrier();
    });
    for (const harness::Outcome& end : found) EXPECT_EQ(harness::code_name(end.code), "ok") << end.text;
  }
}

/// The formulas in docs/layer.md.
TEST(MoeLayerScaling, MemoryOfScalesPerChannel) {
  const MoeLayerMemory block = MoeLayer::memory_required(scaled(ScaleGranularity::block), 2, Backend::cuda);
  MoeLayerConfig c = scaled(ScaleGranularity::per_channel);
  c.intermediate = 2048;
  const auto rows = static_cast<size_t>(2 * c.max_tokens * c.topk), tokens = static_cast<size_t>(c.max_tokens),
             hidden = static_cast<size_t>(c.hidden), width = size_t{2048};
  const auto scratch = [&](OutputScaling scaling) {
    c.intermediate_scaling = scaling;
    return MoeLayer::memory_required(c, 2, Backend::cuda).scratch_bytes;
  };
  const size_t of_tokens = tokens * (hidden + scale_row_bytes(c.hidden, ScaleKind::f32)), of_scales = (rows * 4 + 15) / 16 * 16;
  const size_t of_calls = of_tokens + 8 * tokens * static_cast<size_t>(c.topk) + 8;  // and of slots
  EXPECT_EQ(scratch(OutputScaling::per_group), of_calls + rows * (width + width / 128 * 4));
  EXPECT_EQ(scratch(OutputScaling::fixed), of_calls + rows * width + of_scales);
  EXPECT_EQ(scratch(OutputScaling::per_row), of_calls + rows * width * 3 + of_scales);
  EXPECT_EQ(MoeLayer::memory_required(c, 2, Backend::cuda).heap_bytes, block.heap_bytes);
  c.exchange = MoeExchange::automatic;  // low latency does not have this form
  EXPECT_EQ(MoeLayer::memory_required(c, 2, Backend::cuda).heap_bytes, block.heap_bytes);
}

}  // namespace
}  // namespace switchyard

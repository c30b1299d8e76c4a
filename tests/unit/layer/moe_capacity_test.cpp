// SPDX-License-Identifier: Apache-2.0
// The capacity of a layer in the fused form that is given none, its memory at published sizes, and the forms that split calls.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "exchange/fused/fused_moe.hpp"
#include "harness/outcome.hpp"
#include "switchyard/layer.hpp"
#include "unit/expert/host_rig.hpp"

namespace switchyard {
namespace {

using detail::FusedMoe;
using detail::FusedMoeConfig;
using harness::expect_text;
using harness::outcome_of;

/// fp8, 128 experts, top-8, hidden 7168, intermediate 2048.
MoeLayerConfig published(int64_t tokens, CombineOrder order) {
  MoeLayerConfig c;
  c.hidden = 7168;
  c.intermediate = 2048;
  c.num_experts = 128;
  c.topk = 8;
  c.max_tokens = tokens;
  c.dtype = DType::fp8_e4m3;
  c.order = order;
  c.form = MoeForm::fused;
  c.storage = WeightStorage::view;
  return c;
}
/// Gigabytes of heap and scratch; `worst`: for worst-case routing, else for `capacity`, or the default if that is 0.
double gigabytes(MoeLayerConfig c, int world, bool worst, int64_t capacity = 0) {
  c.capacity = worst ? world * c.max_tokens * c.topk : capacity;
  if (capacity > 0) c.overflow = Overflow::split;
  return static_cast<double>(MoeLayer::memory_required(c, world, Backend::cuda).total()) * 1e-9;
}

// The numbers of docs/layer.md.
TEST(MoeCapacity, BoundsTheMemory) {
  struct Size {
    int world;
    int64_t tokens;
    CombineOrder order;
    int64_t capacity;
    double min, max, of_worst;
  };
  const int64_t quarter_more = 4096 * 8 * 5 / 4;
  const Size sizes[] = {{8, 4096, CombineOrder::per_rank, 0, 1.5, 1.675, 0.36},
                        {8, 4096, CombineOrder::per_route, 0, 1.5, 1.675, 0.36},
                        {8, 32768, CombineOrder::per_rank, 0, 12, 13, 0.36},
                        {2, 4096, CombineOrder::per_rank, 0, 1.1, 1.3, 1},
                        {2, 4096, CombineOrder::per_rank, quarter_more, 0.8, 0.9, 0.7},
                        {2, 4096, CombineOrder::per_route, quarter_more, 1.1, 1.2, 0.78}};
  for (const Size& s : sizes) {
    const MoeLayerConfig c = published(s.tokens, s.order);
    const double given = gigabytes(c, s.world, false, s.capacity), worst = gigabytes(c, s.world, true);
    const std::string text = std::to_string(s.world) + " ranks, " + std::to_string(s.tokens) + " tokens, " +
                             to_string(s.order) + ": " + std::to_string(given) + " GB, for any routing " +
                             std::to_string(worst) + " GB";
    RecordProperty("memory_" + std::to_string(&s - sizes), text);
    EXPECT_GE(given, s.min) << text;
    EXPECT_LE(given, s.max) << text;
    EXPECT_LE(given, s.of_worst * worst + 1e-3) << text;
  }
}

/// The configuration of FusedMoe with the memory of a layer, to find a layer's capacity.
size_t memory_with(const MoeLayerConfig& c, int world, int64_t capacity, Overflow overflow) {
  FusedMoeConfig f;
  f.hidden = c.hidden;
  f.intermediate = c.intermediate;
  f.num_experts = c.num_experts;
  f.topk = c.topk;
  f.max_tokens = c.max_tokens;
  f.dtype = c.dtype;
  f.order = c.order;
  f.capacity = capacity;
  f.overflow = overflow;
  const detail::FusedMoeMemory m = FusedMoe::memory_required(f, world);
  return m.heap_bytes + m.private_bytes;
}

TEST(MoeCapacity, IsTwiceTheMeanButNotLessThanItsLimit) {
  const auto is = [](int world, int64_t tokens, int64_t rows, const std::function<void(MoeLayerConfig&)>& change = {}) {
    MoeLayerConfig c = published(tokens, CombineOrder::per_route);
    if (change) change(c);
    const size_t got = MoeLayer::memory_required(c, world, Backend::cuda).total();
    EXPECT_EQ(got, memory_with(c, world, rows, rows > 0 ? Overflow::split : Overflow::fail)) << world << ", " << tokens;
  };
  is(1, 100000, 0);
  is(2, 4096, 0);
  is(2, 60000, 0);
  is(8, 1024, 0);  // 65536 rows at most
  is(8, 1032, kMoeSplitRows);
  is(8, 4096, kMoeSplitRows);
  is(8, 4104, 2 * 4104 * 8);
  is(4, 32768, 2 * 32768 * 8);
  is(8, 4096, kMoeSplitRows, [](auto& c) { c.dtype = DType::bf16; });
  is(8, 4096, kMoeSplitRows, [](auto& c) { c.dtype = DType::bf16, c.form = MoeForm::automatic; });
  is(8, 4096, 0, [](auto& c) { c.overflow = Overflow::drop_and_report; });
  is(8, 4096, kMoeSplitRows, [](auto& c) { c.overflow = Overflow::split; });
}

TEST(MoeCapacity, OnlyTheFusedFormSplits) {
  const auto end_of = [](Backend backend, const std::function<void(MoeLayerConfig&)>& change) {
    MoeLayerConfig c = published(64, CombineOrder::per_route);
    c.overflow = Overflow::split;
    c.form = MoeForm::automatic;
    if (backend == Backend::cpu) c.dtype = DType::bf16;
    change(c);
    return outcome_of([&] { (void)MoeLayer::memory_required(c, 2, backend); });
  };
  for (const Backend backend : {Backend::cpu, Backend::cuda}) {
    EXPECT_EQ(end_of(backend, [](auto&) {}).code, ErrorCode::ok);
    const auto refused = [&](const std::function<void(MoeLayerConfig&)>& change) {
      expect_text(end_of(backend, change), ErrorCode::unsupported,
                  "MoeLayerConfig::overflow = split: must be fail or drop_and_report, except in the fused form");
    };
    refused([](auto& c) { c.form = MoeForm::separate; });
    refused([](auto& c) { c.exchange = MoeExchange::low_latency; });
    refused([](auto& c) { c.order = CombineOrder::per_host; });
  }
  expect_text(end_of(Backend::cuda, [](auto& c) { c.capacity = 7; }), ErrorCode::invalid_argument,
              "MoeLayerConfig::capacity = 7: must be 0 or at least 16 for overflow split");
}

/// A layer reports its choices, and all ranks split alike. Split calls have the results of a layer with a capacity for any
/// routing if a row's result does not depend on the other rows of its tile, for which weights of zeros are enough.
TEST(MoeCapacity, IsReportedByTheLayer) {
  MoeLayerConfig c;
  c.hidden = 32;
  c.intermediate = 16;
  c.num_experts = 4;
  c.topk = 2;
  c.max_tokens = 8;
  c.capacity = 2 * 2 * 3;
  c.overflow = Overflow::split;
  GroupOptions options;
  options.heap_bytes = MoeLayer::heap_bytes(c, 2);
  std::vector<Group> groups = Group::in_process(2, options);
  launch::on_threads(2, [&](size_t r) {
    testing::HostRig rig;
    void* const weights = rig.allocate(4 * 2 * 16 * 32 * 2);
    std::memset(weights, 0, 4 * 2 * 16 * 32 * 2);
    MoeLayer layer(groups[r], c, weights, weights);
    EXPECT_EQ(layer.config().form, MoeForm::fused);
    EXPECT_EQ(layer.config().exchange, MoeExchange::normal);
    EXPECT_EQ(layer.config().overflow, Overflow::split);
    EXPECT_EQ(layer.config().capacity, 12);
    const std::vector<uint16_t> x(8 * 32, 0x3F80);
    std::vector<uint16_t> out(x.size(), 7);
    const std::vector<int32_t> ids(16, 3);
    layer.forward(x.data(), ExpertIds::of(ids.data(), 8, 2), nullptr, out.data());
    EXPECT_EQ(out, std::vector<uint16_t>(x.size(), 0));
    EXPECT_TRUE(layer.dropped().empty());
  });
}

// Dispatch has no passes.
TEST(MoeCapacity, NormalModeDoesNotSplit) {
  GroupOptions options;
  NormalConfig c;
  c.hidden = 32;
  c.num_experts = 4;
  c.topk = 2;
  c.max_tokens = 8;
  options.heap_bytes = NormalExchange::heap_bytes(c, 1);
  std::vector<Group> groups = Group::in_process(1, options);
  NormalExchange exchange(groups[0], c);
  const std::vector<uint16_t> x(8 * 32);
  const std::vector<int32_t> ids(16, 3);
  DispatchOptions split;
  split.overflow = Overflow::split;
  split.size = SizePolicy::capacity;
  split.capacity = 100;
  expect_text(outcome_of([&] {
                (void)exchange.dispatch({x.data(), 8, 32, DType::bf16}, ExpertIds::of(ids.data(), 8, 2), nullptr, split);
              }),
              ErrorCode::invalid_argument, "DispatchOptions::overflow = split: must be fail or drop_and_report");
}

}  // namespace
}  // namespace switchyard

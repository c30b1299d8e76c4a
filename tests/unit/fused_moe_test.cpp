// SPDX-License-Identifier: Apache-2.0
// FusedMoe without a call: its memory, the fields that it rejects, and the error in a CPU group without products, which is
// identical on all ranks. Its results are tested in modes/fused/fused_group_test.cpp and, on GPUs, in
// gpu/gemm/gpu_moe_layer_test.cpp.
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "exchange/fused/fused_moe.hpp"
#include "harness/outcome.hpp"

namespace switchyard {
namespace {

using detail::FusedMoe;
using detail::FusedMoeConfig;
using detail::FusedMoeMemory;
using harness::expect_text;
using harness::Outcome;
using harness::outcome_of;

FusedMoeConfig small() {
  FusedMoeConfig c;
  c.hidden = 256;
  c.intermediate = 128;
  c.num_experts = 4;
  c.topk = 2;
  c.max_tokens = 64;
  return c;
}

/// Returns the additional memory for two ranks that is caused by changing one field.
FusedMoeMemory added_by(const std::function<void(FusedMoeConfig&)>& change, FusedMoeConfig c = small()) {
  const FusedMoeMemory before = FusedMoe::memory_required(c, 2);
  change(c);
  const FusedMoeMemory after = FusedMoe::memory_required(c, 2);
  return {after.heap_bytes - before.heap_bytes, after.private_bytes - before.private_bytes};
}

// The formulas of docs/layer.md. Sizes are chosen to avoid rounding except where noted.
TEST(FusedMoeMemory, FollowsTheFormula) {
  constexpr size_t kRows = 2 * 64 * 2, kElement = 2, kFlag = 8;
  // Rows twice as wide: tokens and inbox are in the heap, outputs, which overwrite received rows, outside.
  FusedMoeMemory more = added_by([](auto& c) { c.hidden = 512; });
  EXPECT_EQ(more.heap_bytes, (64 + 64 * 2) * 256 * kElement);
  const size_t tiles = kRows / 176 + 2;
  const auto rounded = [](size_t bytes) { return (bytes + 127) / 128 * 128; };
  EXPECT_EQ(more.private_bytes, kRows * 256 * kElement + rounded(2 * tiles * kFlag) - rounded(tiles * kFlag));
  more = added_by([](auto& c) { c.intermediate = 1280; });
  EXPECT_EQ(more.heap_bytes, 0u);
  EXPECT_EQ(more.private_bytes, kRows * 1152 * kElement + rounded(10 * tiles * kFlag) - rounded(tiles * kFlag));
  // per_rank: weights beside the places of rows, and a returned row per rank instead of route.
  const auto per_rank = [](auto& c) { c.order = CombineOrder::per_rank; };
  EXPECT_EQ(added_by(per_rank).heap_bytes, kRows * 4 * 2);
  EXPECT_EQ(added_by(per_rank).private_bytes, 0u);
  FusedMoeConfig wide = small();
  wide.topk = 4;
  EXPECT_EQ(added_by(per_rank, wide).heap_bytes + 64 * 2 * (256 * kElement + kFlag), 2 * kRows * 4 * 4);
  // Twice as many tokens require twice as many rows.
  more = added_by([](auto& c) { c.max_tokens = 128; });
  EXPECT_EQ(more.heap_bytes, 64 * 3 * 256 * kElement + 64 * 2 * kFlag + kRows * (8 + 4 * 2));
  EXPECT_GE(more.private_bytes, kRows * (256 + 128) * kElement + kRows * kFlag);
  EXPECT_LE(more.private_bytes, kRows * (256 + 128) * kElement + kRows * kFlag + 64 * 64 + 1024);  // plus tables
  // A capacity that is never reached requires the same memory as no capacity; one that can be reached reduces only the experts'
  // rows.
  more = added_by([](auto& c) { c.capacity = 1 << 20; });
  EXPECT_EQ(more.heap_bytes + more.private_bytes, 0u);
  FusedMoeConfig bounded = small();
  bounded.capacity = 64;
  more = added_by([](auto& c) { c.capacity = 0; }, bounded);
  EXPECT_EQ(more.heap_bytes, (kRows - 64) * (8 + 4 * 2));
  const size_t flags = rounded((64 / 176 + 2) * kFlag);
  EXPECT_EQ(more.private_bytes, (kRows - 64) * ((256 + 128) * kElement + kFlag) + 2 * (rounded(tiles * kFlag) - flags));
}

TEST(FusedMoeMemory, OfTheCpuFollowsItsFormula) {
  constexpr size_t kRows = 2 * 64 * 2, kSlots = 8 * 64 * 2 + 8;
  FusedMoeConfig c = small();
  const FusedMoeMemory m = FusedMoe::memory_required(c, 2, Backend::cpu);
  EXPECT_EQ(m.heap_bytes, FusedMoe::memory_required(c, 2).heap_bytes);
  EXPECT_EQ(m.private_bytes, 128 + kRows * (3 * 8 + (256 + 128) * 2) + kSlots);
  c.num_experts = 5;
  EXPECT_EQ(FusedMoe::memory_required(c, 2, Backend::cpu).private_bytes, m.private_bytes);
  c.capacity = 64;
  EXPECT_EQ(FusedMoe::memory_required(c, 2, Backend::cpu).private_bytes, 128 + 64 * (3 * 8 + (256 + 128) * 2) + kSlots);
  const auto wrong = outcome_of([&] { (void)FusedMoe::memory_required(c, 2, static_cast<Backend>(7)); });
  expect_text(wrong, ErrorCode::invalid_argument, "backend = 7: must be cpu (0) or cuda (1)");
}

// Each multiplied element takes one byte plus its share of a scale. Each weight scale takes a float4.
TEST(FusedMoeMemory, OfFp8FollowsItsFormula) {
  constexpr size_t kRows = 2 * 64 * 2, kFlag = 8;
  FusedMoeConfig c = small();
  c.dtype = DType::fp8_e4m3;
  FusedMoeMemory more = added_by([](auto& changed) { changed.hidden = 512; }, c);
  // A token has 256 bytes and two scales, padded to 384 bytes, or 512 bytes and four scales, padded to 640 bytes. Its output is
  // bf16.
  EXPECT_EQ(more.heap_bytes, 64 * (640 - 384) + 64 * 2 * 256 * 2);
  const size_t tiles = 2 * (kRows / 128 + 2);
  const auto rounded = [](size_t bytes) { return (bytes + 127) / 128 * 128; };
  // Two local experts, 128 x 128 elements per scale: w13 [2 * 128, hidden] and w2 [hidden, 128].
  const auto weights = [&](size_t hidden) { return rounded(2 * (hidden / 128 + (hidden + 255) / 256) * 16); };
  EXPECT_EQ(more.private_bytes, kRows * 256 * 2 + 2 * kRows * 4 + rounded(2 * tiles * kFlag) - rounded(tiles * kFlag) +
                                    weights(512) - weights(256));
  EXPECT_LT(FusedMoe::memory_required(c, 2).heap_bytes, FusedMoe::memory_required(small(), 2).heap_bytes);
  expect_text(outcome_of([&] { (void)FusedMoe::memory_required(c, 2, Backend::cpu); }), ErrorCode::unsupported,
              "MoeLayerConfig::dtype = fp8_e4m3: must be bf16 on the CPU");
}

TEST(FusedMoeConfigs, ErrorsOfFp8NameTheField) {
  const auto refused = [](const std::string& part, const std::function<void(FusedMoeConfig&)>& change) {
    FusedMoeConfig c = small();
    c.dtype = DType::fp8_e4m3;
    change(c);
    expect_text(outcome_of([&] { (void)FusedMoe::memory_required(c, 2); }), ErrorCode::invalid_argument, part);
  };
  refused("MoeLayerConfig::dtype = f16: must be bf16 or fp8_e4m3", [](auto& c) { c.dtype = DType::f16; });
  refused("MoeLayerConfig::dtype = 9: must be bf16 or fp8_e4m3", [](auto& c) { c.dtype = static_cast<DType>(9); });
  refused("MoeLayerConfig::hidden = 192: must be a multiple of 128", [](auto& c) { c.hidden = 192; });
  refused("MoeLayerConfig::intermediate = 136: must be a multiple of 128", [](auto& c) { c.intermediate = 136; });
  refused("MoeLayerConfig::hidden (fp8) = 65664: must be in [128, 65536]", [](auto& c) { c.hidden = 65664; });
  refused("MoeLayerConfig::num_experts = 4097: must be at most 2040 of a rank", [](auto& c) { c.num_experts = 4097; });
  refused("MoeLayerConfig::row_scales = none", [](auto& c) { c.row_scales = ScaleKind::none; });
  refused("MoeLayerConfig::weight_scales = 3", [](auto& c) { c.weight_scales = static_cast<ScaleKind>(3); });
}

TEST(FusedMoeMemory, IsThatOfARankWithMostExperts) {
  FusedMoeConfig c = small();
  c.num_experts = 5;  // ranks have three and two experts
  EXPECT_GE(FusedMoe::memory_required(c, 2).private_bytes, FusedMoe::memory_required(small(), 2).private_bytes);
  c.num_experts = 1;  // one rank has no experts
  EXPECT_GT(FusedMoe::memory_required(c, 2).private_bytes, 0u);
  c.max_tokens = 0;
  EXPECT_GT(FusedMoe::memory_required(c, 2).heap_bytes, 0u);  // counts and flags
  EXPECT_LT(FusedMoe::memory_required(c, 2).heap_bytes, size_t{1} << 14);
  EXPECT_GT(FusedMoe::heap_bytes(c, 2), FusedMoe::memory_required(c, 2).heap_bytes);
}

TEST(FusedMoeConfigs, ErrorsNameTheField) {
  const auto refused = [](const std::string& part, const std::function<void(FusedMoeConfig&)>& change, int world = 2) {
    FusedMoeConfig c = small();
    change(c);
    expect_text(outcome_of([&] { (void)FusedMoe::memory_required(c, world); }), ErrorCode::invalid_argument, part);
    expect_text(outcome_of([&] { (void)FusedMoe::heap_bytes(c, world); }), ErrorCode::invalid_argument, part);
  };
  refused(
      "world = 0: must be in [1, 64]", [](auto&) {}, 0);
  refused(
      "world = 65: must be in [1, 64]", [](auto&) {}, 65);
  refused("MoeLayerConfig::hidden = 0: must be in [8, 1048320]", [](auto& c) { c.hidden = 0; });
  refused("MoeLayerConfig::hidden = 1048328: must be in [8, ", [](auto& c) { c.hidden = 1048328; });
  refused("MoeLayerConfig::hidden = 36: must be a multiple of 8", [](auto& c) { c.hidden = 36; });
  refused("MoeLayerConfig::intermediate = 0: must be in [8, 524160]", [](auto& c) { c.intermediate = 0; });
  refused("MoeLayerConfig::intermediate = 524168: must be in [8, ", [](auto& c) { c.intermediate = 524168; });
  refused("MoeLayerConfig::intermediate = 20: must be a multiple of 8", [](auto& c) { c.intermediate = 20; });
  refused("MoeLayerConfig::num_experts = 0: must be in [1, 4608]", [](auto& c) { c.num_experts = 0; });
  refused("MoeLayerConfig::num_experts = 4609: must be in [1, ", [](auto& c) { c.num_experts = 4609; });
  refused("MoeLayerConfig::topk = 0: must be in [1, 32]", [](auto& c) { c.topk = 0; });
  refused("MoeLayerConfig::topk = 33: must be in [1, 32]", [](auto& c) { c.topk = 33; });
  refused("MoeLayerConfig::max_tokens = -1: must be in [0, 536870911]", [](auto& c) { c.max_tokens = -1; });
  refused("MoeLayerConfig::max_tokens = 536870912: must be in [0, ", [](auto& c) { c.max_tokens = 536870912; });
  refused("MoeLayerConfig::capacity = -1: must be in [0, 2147483647]", [](auto& c) { c.capacity = -1; });
  refused("MoeLayerConfig::capacity = 2147483648: must be in [0, ", [](auto& c) { c.capacity = int64_t{1} << 31; });
  // Tile numbers have 20 bits and tickets 30, which permits (2^20 - 2) * 176 rows, and fewer for 4095 + 4095 columns of tiles.
  refused("MoeLayerConfig::capacity = 184549025: must be at most 184549024 rows of a rank", [](auto& c) {
    c.max_tokens = 100 << 20;
    c.capacity = 184549025;
  });
  refused("MoeLayerConfig::max_tokens = 104857600: must be fewer, or capacity at most 184549024 rows",
          [](auto& c) { c.max_tokens = 100 << 20; });
  refused("MoeLayerConfig::max_tokens = 8388608: must be fewer, or capacity at most 23073952 rows", [](auto& c) {
    c.hidden = 1048320;
    c.intermediate = 524160;
    c.max_tokens = 8 << 20;
  });
  refused("MoeLayerConfig::order = per_host: must be per_rank or per_route", [](auto& c) { c.order = CombineOrder::per_host; });
  refused("MoeLayerConfig::order = 7: must be per_rank (0)", [](auto& c) { c.order = static_cast<CombineOrder>(7); });
  refused("MoeLayerConfig::overflow = 7: must be fail (0), drop_and_report (1) or split (2)",
          [](auto& c) { c.overflow = static_cast<Overflow>(7); });
}

// All ranks report the same error, for valid and invalid settings, and the group stays usable.
TEST(FusedMoes, OfWeightsNeedAGroupOfGpus) {
  const auto options = harness::options_with(std::chrono::seconds(20));
  const std::vector<Outcome> ends = harness::outcomes(2, options, [&](Group& group) {
    std::vector<Outcome> tries;
    for (const bool wrong : {false, true}) {
      FusedMoeConfig config = small();
      if (wrong && group.rank() == 1) config.topk = 0;
      tries.push_back(outcome_of([&] { FusedMoe layer(group, config, nullptr, nullptr); }));
      group.barrier();
    }
    group.check();
    for (const Outcome& end : tries) expect_text(end, ErrorCode::unsupported, "FusedMoe: the group is of CPUs");
  });
  for (const Outcome& end : ends) EXPECT_EQ(harness::code_name(end.code), "ok") << end.text;
}

}  // namespace
}  // namespace switchyard

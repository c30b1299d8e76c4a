// SPDX-License-Identifier: Apache-2.0
// Randomized exchanges: shape, routing, types, layout, staging, sizes, capacity, workers and delays are drawn from a seed, and
// all results are compared bitwise with the oracle.
//
// SWITCHYARD_SEED: the seed of the first batch (default: 1). SWITCHYARD_RANDOM_EXCHANGES: the number of dispatch + combine
// pairs (default: 2500; with sanitizers, 1000; on GPUs, 600). A failure message states the seed of its batch; to run only that
// batch, set this seed and SWITCHYARD_RANDOM_EXCHANGES=1.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>

#include "harness/draw.hpp"
#include "harness/rank_team.hpp"
#include "modes/normal/scenario.hpp"

namespace harness {
namespace {

#if defined(SWITCHYARD_TEST_CUDA)
constexpr uint64_t kDefaultExchanges = 600;
#elif defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kDefaultExchanges = 1000;
#else
constexpr uint64_t kDefaultExchanges = 2500;
#endif

void draw_types(Draw& draw, Scenario& s) {
  constexpr DType kTypes[] = {DType::bf16, DType::bf16, DType::f16, DType::f32};
  constexpr ScaleKind kScales[] = {ScaleKind::f32, ScaleKind::ue8m0};
  s.hidden = 16 * draw.one_of({int64_t{1}, int64_t{2}, int64_t{4}, int64_t{8}, int64_t{9}, int64_t{17}});
  s.x_type = draw.one_of(kTypes);
  s.y_type = draw.one_in(3) ? draw.one_of(kTypes) : s.x_type;
  s.y_pattern = draw.one_in(3) ? Pattern::wild_values : Pattern::random_values;
  s.output_memory = draw.one_in(2) ? OutputMemory::ordinary : OutputMemory::row_buffer;
  if (draw.one_in(5)) {
    s.x_type = DType::fp8_e4m3;
    s.x_scales = draw.one_of(kScales);
    s.y_type = DType::bf16;
  } else if (draw.one_in(4)) {
    s.quantize = draw.one_of(kScales);
    s.x_pattern = draw.one_in(2) ? Pattern::quantise_cases : Pattern::wild_values;
  } else {
    if (s.x_type == DType::bf16 && draw.one_in(4)) s.hidden += 8;
    if (s.x_type == s.y_type && draw.one_in(3)) s.output_memory = OutputMemory::in_place;
    s.identity = s.x_type == s.y_type && draw.one_in(5);
    if (s.identity) s.x_pattern = Pattern::wild_values;
  }
}

Scenario draw_scenario(Draw& draw, int world) {
  Scenario s;
  oracle::Problem& p = s.problem;
  p.world = world;
  p.experts = static_cast<int>(draw.one_in(4) ? draw.between(1, 4) : draw.between(1, 48));
  p.topk = static_cast<int>(draw.one_in(6) ? draw.between(9, 32) : draw.between(1, 8));
  p.layout = draw.one_in(2) ? Layout::rank_major : Layout::expert_major;
  p.alignment = draw.one_of({1, 1, 2, 5, 8, 16});
  s.routing = draw.one_of(kAllRoutings);
  const int64_t largest = draw.one_in(5) ? 70 : 24;
  for (int r = 0; r < world; ++r) s.tokens.push_back(draw.one_in(5) ? draw.between(0, 1) : draw.between(0, largest));
  s.problem.max_tokens = draw.one_in(3) ? largest : 0;
  s.drop_percent = static_cast<int>(draw.one_in(3) ? draw.between(1, 40) : 0);
  s.weights = !draw.one_in(4);
  s.int64_ids = draw.one_in(2);
  s.seed = draw.bits();
  if (draw.one_in(4)) {
    p.overflow = switchyard::Overflow::drop_and_report;
    s.capacity_percent = static_cast<int>(draw.between(1, 120));
  } else if (draw.one_in(4)) {
    p.size = switchyard::SizePolicy::worst_case;
  }
  draw_types(draw, s);
  s.staging = draw.one_in(2) ? Staging::direct : Staging::ring;
  s.ring.num_channels = static_cast<int>(draw.between(1, 6));
  s.ring.slots = std::max(p.topk, static_cast<int>(draw.between(1, 40)));
  s.ring.send_chunk = static_cast<int>(draw.between(1, s.ring.slots));
  s.first_epoch = draw.one_in(3) ? (uint64_t{1} << 40) - static_cast<uint64_t>(draw.between(0, 5))
                                 : static_cast<uint64_t>(draw.between(1, 9));
  const bool per_route = p.layout == Layout::expert_major && draw.one_in(2);
  s.order = per_route ? CombineOrder::per_route : CombineOrder::per_rank;
  s.num_bias = static_cast<int>(draw.one_in(2) ? 0 : draw.between(1, 2));
  s.apply_weights = !draw.one_in(5);
  s.replace_weights = per_route ? draw.one_in(3) : p.layout == Layout::rank_major && draw.one_in(2);
  if (!(per_route && s.replace_weights) && oracle::mix(s.seed, 0x4057) % 3 == 0) s.order = CombineOrder::per_host;
  s.repeats = static_cast<int>(draw.between(1, 2));
  s.cached = draw.one_in(2);
  s.max_delay_us = draw.one_in(2) ? 0 : static_cast<int>(draw.between(1, 400));
  s.check_views = draw.one_in(3);
  return s;
}

#if defined(SWITCHYARD_TEST_CUDA)
/// Multiprocessor counts for which kernels divide their work in all ways and all ranks fit on one GPU with 132 multiprocessors.
/// Occasionally, rows are copied in bulk.
void draw_for_gpus(Draw draw, Scenario& s) {
  s.num_sms = draw.one_of({1, 2, 5, 16, s.problem.world <= 2 ? 48 : 16});
  const int64_t tokens = *std::max_element(s.tokens.begin(), s.tokens.end());
  const int64_t longer = 8 * s.hidden, rows = s.problem.world * std::max(tokens, s.problem.max_tokens) * s.problem.topk;
  if (draw.one_in(2) && rows * longer <= int64_t{1} << 21) s.hidden = longer;
}
#endif

TEST(Random, ExchangesInAnyWorld) {
  const RankTeam* const team = RankTeam::mine();
  const uint64_t first = from_environment("SWITCHYARD_SEED", 1);
  const uint64_t wanted = from_environment("SWITCHYARD_RANDOM_EXCHANGES", kDefaultExchanges);
  uint64_t done = 0;
  for (uint64_t seed = first; done < wanted; ++seed) {
    Draw draw(oracle::mix(seed, 0xBA7C4));
    const int drawn = draw.one_of({1, 2, 2, 3, 4, 5, 7, 8}), world = team ? team->world() : drawn;
    const Workers workers{static_cast<int>(draw.between(1, 2)), static_cast<int>(draw.between(1, 3)), draw.one_in(2)};
    std::vector<std::shared_ptr<const Case>> cases;
    for (int i = 0; i < 6; ++i) {
      Scenario s = draw_scenario(draw, world);
#if defined(SWITCHYARD_TEST_CUDA)
      draw_for_gpus(Draw(oracle::mix(s.seed, 0x6B05)), s);
#endif
      s.name = "seed " + std::to_string(seed) + " scenario " + std::to_string(i);
      done += static_cast<uint64_t>(s.repeats * (s.cached ? 2 : 1));
      cases.push_back(make_case(s));
    }
    const std::string mismatches = run_cases(ranks_of_suite(), workers, cases);
    ASSERT_EQ(mismatches, "") << "reproduce with SWITCHYARD_SEED=" << seed << " SWITCHYARD_RANDOM_EXCHANGES=1 (W" << world
                              << ", workers " << to_string(workers) << ")";
  }
  std::cout << done << " exchanges from seed " << first << ", no mismatch\n";
}

}  // namespace
}  // namespace harness

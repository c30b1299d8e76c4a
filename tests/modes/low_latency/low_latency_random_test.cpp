// SPDX-License-Identifier: Apache-2.0
// Randomized low-latency calls: shapes, routings, types, orders, send methods, outputs, split calls, workers and delays are
// drawn from a seed, and all results are compared bitwise with the oracle. The calls of a script are queued, so only their own
// flags keep the ranks in step.
//
// SWITCHYARD_SEED: the seed of the first batch (default: 1). SWITCHYARD_RANDOM_CALLS: the number of calls (default: 1000; with
// sanitizers, 600; on GPUs, 3000). A failure message states the seed of its batch; to run only that batch, set this seed and
// SWITCHYARD_RANDOM_CALLS=1.
#include <gtest/gtest.h>

#include <iostream>

#include "harness/draw.hpp"
#include "modes/low_latency/low_latency_script.hpp"

namespace harness {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kDefaultCalls = 600;
#elif defined(SWITCHYARD_TEST_CUDA)
constexpr uint64_t kDefaultCalls = 3000;
#else
constexpr uint64_t kDefaultCalls = 1000;
#endif
constexpr int64_t kCallsOfScript = 25;

constexpr DType kTypes[] = {DType::bf16, DType::bf16, DType::f16, DType::f32};

LowLatencyConfig draw_config(Draw& draw) {
  LowLatencyConfig c;
  c.num_experts = static_cast<int>(draw.one_in(4) ? draw.between(1, 4) : draw.between(1, 48));
  c.topk = static_cast<int>(draw.one_in(6) ? draw.between(9, 32) : draw.between(1, 8));
  c.max_tokens = draw.one_in(3) ? draw.between(1, 3) : draw.one_in(5) ? 60 : draw.between(4, 20);
  c.dtype = draw.one_of(kTypes);
  c.scales = draw.one_of({ScaleKind::none, ScaleKind::f32, ScaleKind::ue8m0});
  c.scale_group = draw.one_of({32, 64, 128});
  c.scale_order = draw.one_in(2) ? ScaleOrder::row_major : ScaleOrder::column_major;
  c.sending = draw.one_in(2) ? Sending::per_rank : Sending::per_route;
  c.hidden = 16 * draw.one_of({int64_t{1}, int64_t{2}, int64_t{7}, int64_t{8}, int64_t{9}, int64_t{17}, int64_t{40}});
  if (c.scales == ScaleKind::none && draw.one_in(3)) c.hidden = draw.between(1, 300);
  c.pieces = static_cast<int>(draw.one_in(2) ? 0 : draw.between(1, 16));
  return c;
}

void draw_dispatch(Draw& draw, LowLatencyScript& s) {
  auto& step = s.dispatch({}, draw.one_of(kAllRoutings));
  for (int r = 0; r < s.world; ++r)
    step.tokens.push_back(draw.one_in(5) ? draw.between(0, 1) : draw.between(0, s.config.max_tokens));
  step.drop_percent = static_cast<int>(draw.one_in(3) ? draw.between(1, 40) : 0);
  step.weights = !draw.one_in(4);
  step.int64_ids = draw.one_in(2);
  step.quantised = s.config.scales != ScaleKind::none && draw.one_in(4);
  if (s.config.scales != ScaleKind::none && !step.quantised)
    step.x_pattern = draw.one_of({Pattern::quantise_cases, Pattern::wild_values, Pattern::random_values});
  step.tokens_in_memory = draw.one_in(3);
  step.output = static_cast<int>(draw.between(0, s.outputs - 1));
  step.split = draw.one_in(3);
}

void draw_combine(Draw& draw, LowLatencyScript& s, int output) {
  auto& step = s.combine(draw.one_in(2) ? CombineOrder::per_rank : CombineOrder::per_route, output);
  step.y_type = draw.one_of(kTypes);
  if (switchyard::dtype_bits(step.y_type) > switchyard::dtype_bits(s.config.dtype)) step.y_type = s.config.dtype;
  step.y_pattern = draw.one_in(3) ? Pattern::wild_values : Pattern::random_values;
  step.replace_weights = step.order == CombineOrder::per_route && draw.one_in(3);
  step.identity = s.config.scales == ScaleKind::none && step.y_type == s.config.dtype && draw.one_in(4);
  step.split = draw.one_in(3);
}

LowLatencyScript draw_script(Draw& draw, int world) {
  LowLatencyScript s;
  s.world = world;
  s.config = draw_config(draw);
  s.first_epoch = draw.one_in(3) ? (uint64_t{1} << 40) - static_cast<uint64_t>(draw.between(0, 20))
                                 : static_cast<uint64_t>(draw.between(1, 9));
  s.seed = draw.bits();
  s.outputs = static_cast<int>(draw.between(1, 3));
  s.max_delay_us = draw.one_in(2) ? 0 : static_cast<int>(draw.between(1, 400));
  if (draw.one_in(4)) {
    s.slow_rank = static_cast<int>(draw.between(0, world - 1));
    s.slow_us = 700;
  }
  std::vector<int> filled;
  while (static_cast<int64_t>(s.steps.size()) < kCallsOfScript) {
    if (filled.empty() || draw.one_in(2)) {
      draw_dispatch(draw, s);
      filled.push_back(s.steps.back().output);
    } else {
      draw_combine(draw, s, filled[draw.bits() % filled.size()]);
    }
  }
  s.num_sms = draw.one_of({0, 0, 1, 2, 3, 16});
  return s;
}

TEST(LowLatencyRandom, Calls) {
  const uint64_t first = from_environment("SWITCHYARD_SEED", 1);
  const uint64_t wanted = from_environment("SWITCHYARD_RANDOM_CALLS", kDefaultCalls);
  uint64_t done = 0;
  for (uint64_t seed = first; done < wanted; ++seed) {
    Draw draw(oracle::mix(seed, 0x10BA7C4));
    const int world = draw.one_of({1, 2, 2, 3, 4, 5, 7, 8});
    const Workers workers{static_cast<int>(draw.between(1, 2)), static_cast<int>(draw.between(1, 3)), draw.one_in(2)};
    std::vector<LowLatencyScript> scripts;
    for (int i = 0; i < 4; ++i) {
      scripts.push_back(draw_script(draw, world));
      scripts.back().name = "seed " + std::to_string(seed) + " script " + std::to_string(i);
      done += scripts.back().steps.size();
    }
    ASSERT_EQ(run_scripts(Ranks::threads, workers, scripts), "")
        << "reproduce with SWITCHYARD_SEED=" << seed << " SWITCHYARD_RANDOM_CALLS=1 (W" << world << ", workers "
        << to_string(workers) << ")";
  }
  std::cout << done << " calls from seed " << first << ", no mismatch\n";
}

}  // namespace
}  // namespace harness

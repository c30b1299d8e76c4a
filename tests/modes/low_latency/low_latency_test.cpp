// SPDX-License-Identifier: Apache-2.0
// Acceptance cases C1 to C11 of low-latency mode: every row, scale, count, index and sum is compared bit by bit, with both send
// methods, in whole and split calls.
//
// Entries: low_latency_threads and low_latency_processes; on GPUs, gpu_low_latency_threads and gpu_low_latency_processes.
#include "harness/everywhere.hpp"
#include "modes/low_latency/low_latency_script.hpp"

namespace harness {
namespace {

constexpr auto kPerRoute = CombineOrder::per_route;
constexpr auto kPerRank = CombineOrder::per_rank;

class LowLatency : public testing::TestWithParam<Where> {
 protected:
  int world() const { return GetParam().world; }

  LowLatencyScript script(const std::string& name, int experts, int topk, int64_t max_tokens, int64_t hidden = 144) const {
    LowLatencyScript s;
    s.name = name;
    s.world = world();
    s.config.hidden = hidden;
    s.config.num_experts = experts;
    s.config.topk = topk;
    s.config.max_tokens = max_tokens;
    s.num_sms = GetParam().workers.warps;
    s.seed = oracle::mix(std::hash<std::string>{}(name), static_cast<uint64_t>(world()));
    return s;
  }
  /// Token counts from 0 to `max`, different on every rank.
  std::vector<int64_t> tokens(int64_t max, uint64_t seed) const {
    std::vector<int64_t> t;
    for (int r = 0; r < world(); ++r)
      t.push_back(static_cast<int64_t>(oracle::mix(seed, static_cast<uint64_t>(r)) % static_cast<uint64_t>(max + 1)));
    return t;
  }
  std::vector<int64_t> all(int64_t t) const { return std::vector<int64_t>(static_cast<size_t>(world()), t); }

  /// Runs with both send methods (under sanitizers, with one of them in turn); every third call is split into two halves.
  void expect_exact(const std::vector<LowLatencyScript>& scripts) const {
    std::vector<LowLatencyScript> both;
    for (LowLatencyScript s : scripts) {
      for (const Sending sending : {Sending::per_rank, Sending::per_route}) {
        if (kSanitizer && s.seed % 2 != static_cast<uint64_t>(sending)) continue;
        s.config.sending = sending;
        for (size_t i = 0; i < s.steps.size(); ++i) s.steps[i].split |= oracle::mix(s.seed, i) % 3 == 0;
        both.push_back(s);
        both.back().name += sending == Sending::per_rank ? " (per rank)" : " (per route)";
      }
    }
    EXPECT_EQ(run_scripts(ranks_of_suite(), GetParam().workers, both), "");
  }
};

TEST_P(LowLatency, C01_RandomTokensAndDelays) {
  std::vector<LowLatencyScript> scripts;
  for (const int64_t max : {int64_t{5}, int64_t{17}}) {
    auto s = script("C1 max " + std::to_string(max), 24, 8, max, 256);
    s.max_delay_us = 300;
    for (uint64_t i = 0; i < 3; ++i) {
      s.dispatch(tokens(max, i + 7)).x_pattern = Pattern::random_values;
      s.combine(i % 2 ? kPerRank : kPerRoute);
    }
    scripts.push_back(s);
  }
  expect_exact(scripts);
}

TEST_P(LowLatency, C02_QuantisedRows) {
  std::vector<LowLatencyScript> scripts;
  int n = world();
  for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0}) {
    for (const int group : {32, 64, 128}) {
      for (const ScaleOrder order : {ScaleOrder::row_major, ScaleOrder::column_major}) {
        constexpr int64_t kHidden[] = {16, 48, 144, 400, 1040};
        constexpr DType kTypes[] = {DType::bf16, DType::f16, DType::f32};
        auto s = script("C2 " + std::to_string(n), 5, 2, 6, kHidden[n % 5]);
        s.config.scales = kind;
        s.config.scale_group = group;
        s.config.scale_order = order;
        s.config.dtype = kTypes[n % 3];
        s.config.pieces = n % 4 == 0 ? 0 : n % 17;
        ++n;
        s.dispatch(tokens(6, 3)).x_pattern = Pattern::quantise_cases;
        s.dispatch(all(6)).x_pattern = Pattern::wild_values;
        s.steps.back().int64_ids = false;
        scripts.push_back(s);
      }
    }
  }
  expect_exact(scripts);
}

TEST_P(LowLatency, C03_Shapes) {
  std::vector<LowLatencyScript> scripts;
  int n = 0;
  for (const int topk : {1, 2, 6, 8, 32}) {
    const int experts[] = {1, world(), world() + 1, 3 * world() - 1, 40};
    constexpr int64_t kHidden[] = {16, 128, 272, 640, 2064};
    auto s = script("C3 K " + std::to_string(topk), experts[(n + world()) % 5], topk, 7, kHidden[n % 5]);
    s.config.pieces = n * 5 % 17;
    s.dispatch(all(7), Routing::uniform).x_pattern = Pattern::random_values;
    s.combine(kPerRoute);
    s.combine(kPerRank).y_pattern = Pattern::wild_values;
    ++n;
    scripts.push_back(s);
  }
  expect_exact(scripts);
}

TEST_P(LowLatency, C04_TokenCounts) {
  std::vector<LowLatencyScript> scripts;
  auto s = script("C4", world() + 2, 3, 4);
  std::vector<int64_t> only_last = all(0), all_but_first = all(4);
  only_last.back() = 4;
  all_but_first.front() = 0;
  for (const auto& t : {all(0), only_last, all(1), all(0), all_but_first, all(4), tokens(4, 1), all(0), all(0)}) {
    s.dispatch(t).x_pattern = Pattern::random_values;
    s.combine(s.steps.size() % 4 == 1 ? kPerRank : kPerRoute);
  }
  scripts.push_back(s);
  s.name = "C4 with T in memory, within and beyond what is allowed";
  for (LowLatencyStep& step : s.steps) step.tokens_in_memory = step.kind == LowLatencyStep::Kind::dispatch;
  scripts.push_back(s);
  auto one = script("C4 at most one token", world(), 2, 1);
  one.dispatch(tokens(1, 5)).x_pattern = Pattern::random_values;
  one.combine(kPerRoute);
  scripts.push_back(one);
  expect_exact(scripts);
}

TEST_P(LowLatency, C05_Drops) {
  std::vector<LowLatencyScript> scripts;
  for (const int percent : {10, 30, 100}) {
    auto s = script("C5 " + std::to_string(percent), 2 * world() + 1, 4, 9);
    for (const bool wide : {true, false}) {
      auto& step = s.dispatch(tokens(9, static_cast<uint64_t>(percent)), Routing::uniform);
      step.drop_percent = percent;
      step.int64_ids = wide;
      step.x_pattern = Pattern::random_values;
      s.combine(wide ? kPerRoute : kPerRank);
    }
    scripts.push_back(s);
  }
  expect_exact(scripts);
}

TEST_P(LowLatency, C06_EverythingToOneExpert) {
  auto s = script("C6", 2 * world() + 1, 1, 8);
  s.dispatch(all(8), Routing::one_expert).x_pattern = Pattern::random_values;
  s.combine(kPerRoute);
  auto many = script("C6 and again", 2 * world() + 1, 5, 8);
  many.dispatch(all(8), Routing::one_expert).x_pattern = Pattern::random_values;
  many.combine(kPerRank);
  expect_exact({s, many});
}

TEST_P(LowLatency, C07_Routings) {
  std::vector<LowLatencyScript> scripts;
  for (const Routing routing : kAllRoutings) {
    auto s = script("C7 " + to_string(routing), 3 * world() + 1, 4, 6, 272);
    for (const CombineOrder order : {kPerRoute, kPerRank}) {
      s.dispatch(tokens(6, 11), routing).x_pattern = Pattern::random_values;
      s.steps.back().drop_percent = order == kPerRoute ? 0 : 15;
      s.combine(order).y_pattern = Pattern::random_values;
    }
    scripts.push_back(s);
  }
  expect_exact(scripts);
}

/// Alternating calls, runs of an odd or even number of dispatches, and outputs combined out of order, across the epoch
/// wraparound.
TEST_P(LowLatency, C08_PhasesAndEpochs) {
  std::vector<LowLatencyScript> scripts;
  auto alternating = script("C8 alternating", world() + 1, 2, 4, 32);
  alternating.first_epoch = (uint64_t{1} << 40) - 5;
  alternating.max_delay_us = 40;
  for (uint64_t i = 0; i < 6; ++i) {
    alternating.dispatch(tokens(4, i)).x_pattern = Pattern::random_values;
    alternating.combine(i % 2 ? kPerRank : kPerRoute);
  }
  alternating.repeats = kSanitizer ? 2 : 6;
  scripts.push_back(alternating);

  auto runs = script("C8 runs of dispatches", world() + 1, 3, 4, 32);
  runs.outputs = 3;
  runs.first_epoch = (uint64_t{1} << 40) - 2;
  for (const int length : {1, 2, 3, 5}) {
    for (int i = 0; i < length; ++i) {
      auto& step = runs.dispatch(tokens(4, static_cast<uint64_t>(10 * length + i)), i % 2 ? Routing::zipf : Routing::uniform);
      step.output = i % 3;
      step.x_pattern = Pattern::random_values;
    }
    if (length >= 3) {
      for (const int output : {1, 2, 0, 1}) runs.combine(output == 1 ? kPerRoute : kPerRank, output);
    }
  }
  runs.repeats = 3;
  scripts.push_back(runs);

  auto slow = script("C8 a slow rank", world(), 2, 4, 32);
  slow.slow_rank = world() - 1;
  for (uint64_t i = 0; i < 2; ++i) slow.dispatch(tokens(4, i)).x_pattern = Pattern::random_values;
  slow.combine(kPerRoute);
  scripts.push_back(slow);
  expect_exact(scripts);
}

/// The rows are combined in place, in the memory to which dispatch delivered them.
TEST_P(LowLatency, C09_RowsInPlace) {
  std::vector<LowLatencyScript> scripts;
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    auto s = script("C9 " + std::to_string(static_cast<int>(type)), 7, 3, 5, 200);
    s.config.dtype = type;
    s.config.scales = ScaleKind::none;
    for (const CombineOrder order : {kPerRoute, kPerRank}) {
      s.dispatch(all(5)).x_pattern = Pattern::wild_values;
      s.combine(order).identity = true;
    }
    scripts.push_back(s);
  }
  expect_exact(scripts);
}

TEST_P(LowLatency, C10_InputModesAndTypes) {
  std::vector<LowLatencyScript> scripts;
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    auto plain = script("C10 plain " + std::to_string(static_cast<int>(type)), 9, 3, 5, 136);
    plain.config.dtype = type;
    plain.config.scales = ScaleKind::none;
    plain.dispatch(all(5)).weights = false;  // raw bits
    plain.combine(kPerRoute).y_pattern = Pattern::wild_values;
    plain.combine(kPerRank).y_pattern = Pattern::wild_values;
    plain.combine(kPerRoute).replace_weights = true;
    scripts.push_back(plain);
  }
  for (const int64_t hidden : {int64_t{1}, int64_t{7}, int64_t{131}}) {  // rows of any size, which are sent unchanged
    auto odd = script("C10 odd rows " + std::to_string(hidden), 9, 3, 5, hidden);
    odd.config.dtype = hidden == 7 ? DType::f32 : DType::bf16;
    odd.config.scales = ScaleKind::none;
    odd.config.pieces = 2;
    odd.dispatch(all(5)).x_pattern = Pattern::random_values;
    odd.combine(kPerRoute);
    odd.combine(kPerRank);
    scripts.push_back(odd);
  }
  for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0}) {
    for (const int group : {32, 128}) {
      auto s = script("C10 given as fp8 " + std::to_string(group), 9, 3, 5, 464);
      s.config.scales = kind;
      s.config.scale_group = group;
      s.config.scale_order = group == 32 ? ScaleOrder::column_major : ScaleOrder::row_major;
      s.config.dtype = DType::f32;
      s.dispatch(tokens(5, 3)).quantised = true;
      s.combine(kPerRoute).y_type = kind == ScaleKind::f32 ? DType::bf16 : DType::f16;
      s.dispatch(tokens(5, 4)).x_pattern = Pattern::random_values;  // the same object also quantizes
      s.combine(kPerRank).y_type = DType::bf16;
      s.combine(kPerRank);
      scripts.push_back(s);
    }
  }
  expect_exact(scripts);
}

TEST_P(LowLatency, C12_OutputsInMemoryOfTheCaller) {
  std::vector<LowLatencyScript> scripts;
  for (const ScaleKind kind : {ScaleKind::none, ScaleKind::f32, ScaleKind::ue8m0}) {
    for (const ScaleOrder order : {ScaleOrder::row_major, ScaleOrder::column_major}) {
      if (kind == ScaleKind::none && order == ScaleOrder::column_major) continue;
      auto s = script("C12 " + std::to_string(scripts.size()), world() + 2, 3, 5, 272);
      s.config.scales = kind;
      s.config.scale_order = order;
      s.own_memory = true;
      s.outputs = 2;
      s.dispatch(all(5)).x_pattern = Pattern::random_values;
      s.dispatch(tokens(5, 2)).x_pattern = Pattern::random_values;
      s.steps.back().output = 1;
      s.combine(kPerRoute);
      s.combine(kPerRank, 1);
      scripts.push_back(s);
    }
  }
  expect_exact(scripts);
}

INSTANTIATE_TEST_SUITE_P(Everywhere, LowLatency, testing::ValuesIn(everywhere(true)), where_name);

class Large : public LowLatency {};

TEST_P(Large, ManyTokensAndPieces) {
  auto s = script("512 tokens", 12, 4, 512, 32);
  s.dispatch(tokens(512, 2)).x_pattern = Pattern::random_values;
  s.combine(kPerRank);
  s.dispatch(all(512), Routing::zipf).x_pattern = Pattern::random_values;
  s.combine(kPerRoute);
  auto wide = script("wide rows", 4, 2, 2, 40064);
  wide.config.dtype = DType::f32;
  wide.config.pieces = 1;  // does not fit the initial scratch of CPU workers
  wide.dispatch(all(2)).x_pattern = Pattern::random_values;
  wide.combine(kPerRank);
  auto pieces = script("16 pieces", 4, 2, 2, 15 * switchyard::kMinPieceColumns + 16);
  pieces.config.pieces = 16;
  pieces.dispatch(all(2)).x_pattern = Pattern::random_values;
  pieces.combine(kPerRank);
  expect_exact({s, wide, pieces});
}

#if defined(SWITCHYARD_TEST_CUDA)
/// GPUs keep ids in shared memory, followed by sets of tokens. Here there is no room for these sets, so places are counted with
/// the ids themselves.
TEST_P(Large, MoreIdsThanSharedMemoryHolds) {
  if (world() > 2) GTEST_SKIP() << "takes long on few multiprocessors";
  auto s = script("8192 tokens", 256, 8, 8192, 16);  // more than 56 000 ids: combine has no room for them either
  s.num_sms = 0;
  s.dispatch({8192, 7003}, Routing::duplicates).x_pattern = Pattern::random_values;
  s.combine(kPerRank);
  s.combine(kPerRoute);
  auto as_is = script("8000 tokens of bf16", 16, 8, 8000, 32);
  as_is.num_sms = 16;
  as_is.config.scales = ScaleKind::none;
  as_is.dispatch({7999, 8000}).x_pattern = Pattern::random_values;
  as_is.combine(kPerRoute);
  expect_exact({s, as_is});
}
#endif

// C11: the traffic saved by token saving. Every test checks the exact bytes of both send methods; this one checks the expected
// ratio.
class Bytes : public LowLatency {};

TEST_P(Bytes, C11_OfUniformRouting) {
  auto s = script("C11", 256, 8, 32, 32);
  s.dispatch(all(32));
  expect_exact({s});
  const auto c = make_low_latency_case(s);
  uint64_t per_rank = 0, per_route = 0;
  for (int r = 0; r < world(); ++r) {
    per_rank += oracle::dispatch_traffic(c->steps[0].problem, r, Sending::per_rank).remote;
    per_route += oracle::dispatch_traffic(c->steps[0].problem, r, Sending::per_route).remote;
  }
  if (world() == 1) {
    EXPECT_EQ(per_rank + per_route, 0u) << "nothing crosses a link";
    return;
  }
  // Distinct ranks among 8 distinct experts out of 256, on 8 ranks.
  const double expected = world() == 8 ? 0.662 : world() == 4 ? 0.452 : 0.249;
  EXPECT_NEAR(static_cast<double>(per_rank) / static_cast<double>(per_route), expected, 0.03);
}

INSTANTIATE_TEST_SUITE_P(Somewhere, Bytes,
                         testing::Values(Where{1, {2, 1, false}}, Where{2, {2, 2, false}}, Where{4, {2, 1, false}},
                                         Where{8, {2, 1, true}}),
                         where_name);
INSTANTIATE_TEST_SUITE_P(Somewhere, Large, testing::Values(Where{2, {2, 2, false}}, Where{8, {2, 1, true}}), where_name);

}  // namespace
}  // namespace harness

// SPDX-License-Identifier: Apache-2.0
// Compares the gates with their definition: the reference sorts everything and shares no code with the library.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "routing/portable_math.hpp"
#include "switchyard/routing.hpp"
#include "unit/routing/refusals.hpp"

namespace switchyard {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> normal(size_t count, uint32_t seed, float scale) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& v : values) {  // sum of uniform values, because the standard's distributions differ between libraries
    v = 0;
    for (int i = 0; i < 12; ++i) v += static_cast<float>(random() >> 8) * 0x1p-24f;
    v = (v - 6) * scale;
  }
  return values;
}

/// Returns the indices of `values`, largest value first; of equal values, the one with the lower index comes first.
std::vector<int> order_of(const std::vector<float>& values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
  return order;
}

struct Choice {
  std::vector<int> ids;
  std::vector<double> weights;
};

Choice expect_deepseek(const DeepSeekV3Gate& gate, const float* logits, const float* bias) {
  const int size = gate.num_experts / gate.num_groups;
  std::vector<float> score, choice, group;
  for (int e = 0; e < gate.num_experts; ++e) {
    score.push_back(static_cast<float>(1 / (1 + std::exp(-static_cast<double>(logits[e])))));
    choice.push_back(score.back() + (bias ? bias[e] : 0.0f));
  }
  for (int g = 0; g < gate.num_groups; ++g) {
    std::vector<float> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    std::sort(members.rbegin(), members.rend());
    group.push_back(size == 1 ? members[0] : members[0] + members[1]);
  }
  std::vector<int> kept = order_of(group);
  kept.resize(gate.topk_groups);
  Choice result;
  for (const int e : order_of(choice)) {
    if (std::find(kept.begin(), kept.end(), e / size) == kept.end()) continue;
    if (static_cast<int>(result.ids.size()) < gate.topk) result.ids.push_back(e);
  }
  double sum = 0;
  for (const int e : result.ids) sum += score[e];
  for (const int e : result.ids)
    result.weights.push_back((gate.normalize ? score[e] / (sum + 1e-20) : score[e]) * gate.scaling);
  return result;
}

Choice expect_softmax(const SoftmaxGate& gate, const float* logits) {
  const std::vector<float> row(logits, logits + gate.num_experts);
  std::vector<int> ids = order_of(row);
  double all = 0, chosen = 0;
  for (const float x : row) all += std::exp(static_cast<double>(x));
  ids.resize(gate.topk);
  for (const int e : ids) chosen += std::exp(static_cast<double>(row[e]));
  Choice result{ids, {}};
  for (const int e : ids) result.weights.push_back(std::exp(static_cast<double>(row[e])) / (gate.renormalize ? chosen : all));
  return result;
}

void expect_token(const Routing& routing, int64_t token, const Choice& expected) {
  for (int k = 0; k < routing.topk; ++k) {
    const size_t i = static_cast<size_t>(token * routing.topk + k);
    ASSERT_EQ(routing.topk_ids[i], expected.ids[k]) << "token " << token << " k " << k;
    ASSERT_NEAR(routing.topk_weights[i], expected.weights[k], 2e-6 * std::abs(expected.weights[k]) + 1e-30)
        << "token " << token << " k " << k;
  }
}

struct GateCase {
  DeepSeekV3Gate gate;
  float bias;  ///< scale of the correction bias, 0: none
};

class DeepSeekGate : public testing::TestWithParam<GateCase> {};

TEST_P(DeepSeekGate, EqualsItsDefinition) {
  const auto [gate, bias_scale] = GetParam();
  constexpr int64_t kTokens = 300;
  const std::vector<float> logits = normal(kTokens * gate.num_experts, 1, 2.0f);
  const std::vector<float> bias = normal(gate.num_experts, 2, bias_scale);
  const float* used = bias_scale != 0 ? bias.data() : nullptr;
  const Routing routing = route(gate, logits.data(), kTokens, used);
  EXPECT_EQ(routing.num_experts, gate.num_experts);
  EXPECT_EQ(routing.num_tokens, kTokens);
  check_routing(routing);
  for (int64_t t = 0; t < kTokens; ++t)
    expect_token(routing, t, expect_deepseek(gate, logits.data() + t * gate.num_experts, used));
}

INSTANTIATE_TEST_SUITE_P(Shapes, DeepSeekGate,
                         testing::Values(GateCase{{}, 0}, GateCase{{}, 0.05f}, GateCase{{}, 1.0f},
                                         GateCase{{256, 8, 8, 4, 1.0f, false}, 0.1f}, GateCase{{64, 6, 1, 1, 1.0f, true}, 0.1f},
                                         GateCase{{384, 8, 1, 1, 2.827f, true}, 0.1f},
                                         GateCase{{12, 3, 12, 5, 2.5f, true}, 0.1f}, GateCase{{8, 4, 2, 1, 2.5f, true}, 1.0f},
                                         GateCase{{32, 32, 4, 4, 2.5f, true}, 1.0f}, GateCase{{1, 1, 1, 1, 2.5f, true}, 0.1f}));

TEST(DeepSeekGate, TiesGoToTheLowerExpertAndGroup) {
  const DeepSeekV3Gate gate{16, 3, 4, 2, 1.0f, true};
  const std::vector<float> logits(32, 0.5f);
  const Routing routing = route(gate, logits.data(), 2);
  for (int64_t t = 0; t < 2; ++t) {
    EXPECT_EQ(std::vector<int32_t>(routing.topk_ids.begin() + t * 3, routing.topk_ids.begin() + t * 3 + 3),
              (std::vector<int32_t>{0, 1, 2}));
  }
  for (const float w : routing.topk_weights) EXPECT_FLOAT_EQ(w, 1.0f / 3);
}

TEST(DeepSeekGate, BiasChangesTheChoiceButNotTheWeights) {
  const DeepSeekV3Gate gate{4, 2, 1, 1, 2.5f, true};
  const float logits[] = {2.0f, 1.0f, 0.0f, -1.0f}, bias[] = {0, 0, 0, 5.0f};
  const Routing plain = route(gate, logits, 1), biased = route(gate, logits, 1, bias);
  EXPECT_EQ(plain.topk_ids, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(biased.topk_ids, (std::vector<int32_t>{3, 0}));
  const double low = 1 / (1 + std::exp(1.0)), high = 1 / (1 + std::exp(-2.0));
  EXPECT_NEAR(biased.topk_weights[0], 2.5 * low / (low + high), 1e-6);
  EXPECT_NEAR(biased.topk_weights[1], 2.5 * high / (low + high), 1e-6);
}

TEST(DeepSeekGate, StaysInTheBestGroupsEvenIfTheirScoresAreNegative) {
  // Group 0 has the best single expert but a poor pair; group 1 has the best sum of two. All biased scores of group 1 except
  // two are negative, but its experts are still chosen before any expert of another group.
  const DeepSeekV3Gate gate{8, 4, 2, 1, 1.0f, true};
  const std::vector<float> logits(8, 0.0f);  // score 0.5
  const float bias[] = {0.9f, -2.0f, -2.0f, -2.0f, 0.3f, 0.2f, -1.0f, -3.0f};
  EXPECT_EQ(route(gate, logits.data(), 1, bias).topk_ids, (std::vector<int32_t>{4, 5, 6, 7}));
}

TEST(DeepSeekGate, NeverUsesMoreGroupsThanAllowed) {
  const DeepSeekV3Gate gate;
  const std::vector<float> logits = normal(500 * 256, 5, 3.0f);
  const Routing routing = route(gate, logits.data(), 500);
  for (int64_t t = 0; t < 500; ++t) {
    std::set<int32_t> groups, ids(routing.topk_ids.begin() + t * 8, routing.topk_ids.begin() + t * 8 + 8);
    for (const int32_t id : ids) groups.insert(id / 32);
    EXPECT_EQ(ids.size(), 8u);
    EXPECT_LE(groups.size(), 4u);
    EXPECT_NEAR(std::accumulate(routing.topk_weights.begin() + t * 8, routing.topk_weights.begin() + t * 8 + 8, 0.0), 2.5,
                1e-5);
  }
}

TEST(DeepSeekGate, InfiniteLogitsAreLegal) {
  const DeepSeekV3Gate gate{4, 2, 1, 1, 1.0f, true};
  const float logits[] = {-kInf, kInf, -kInf, -kInf};
  const Routing routing = route(gate, logits, 1);
  EXPECT_EQ(routing.topk_ids, (std::vector<int32_t>{1, 0}));
  EXPECT_EQ(routing.topk_weights, (std::vector<float>{1.0f, 0.0f}));
  const float none[] = {-kInf, -kInf, -kInf, -kInf};
  EXPECT_EQ(route(gate, none, 1).topk_weights, (std::vector<float>{0.0f, 0.0f}));  // 0 / 1e-20
}

TEST(DeepSeekGate, NoTokens) {
  const Routing routing = route(DeepSeekV3Gate{}, nullptr, 0);
  EXPECT_EQ(routing.num_tokens, 0);
  EXPECT_TRUE(routing.topk_ids.empty());
}

TEST(DeepSeekGate, RefusesWhatItCannotDo) {
  const std::vector<float> zeros(512, 0.0f);
  const auto with = [&](const DeepSeekV3Gate& gate) { return [&, gate] { route(gate, zeros.data(), 1); }; };
  expect_refused(with({0, 1, 1, 1, 1, true}), "route: num_experts is 0; allowed: 1 to 2147483647");
  expect_refused(with({256, 8, 7, 4, 1, true}), "route: num_groups is 7; allowed: divisors of num_experts 256");
  expect_refused(with({256, 8, 0, 4, 1, true}), "route: num_groups is 0; allowed: 1 to 256");
  expect_refused(with({256, 8, 8, 9, 1, true}), "route: topk_groups is 9; allowed: 1 to 8");
  expect_refused(with({16, 5, 8, 2, 1, true}), "route: topk is 5; allowed: 1 to 4");
  expect_refused(with({256, 33, 8, 8, 1, true}), "route: topk is 33; allowed: 1 to 32");
  expect_refused(with({256, 8, 8, 4, kNan, true}), "route: scaling is NaN; allowed: finite numbers");
  expect_refused([&] { route(DeepSeekV3Gate{}, zeros.data(), -1); }, "route: tokens is -1; allowed: 0 to 549755813888");
  expect_refused([&] { route(DeepSeekV3Gate{}, nullptr, 1); }, "route: logits is null; allowed: float32 [tokens, num_experts]");
  std::vector<float> bad = zeros;
  bad[256 + 3] = kNan;
  expect_refused([&] { route(DeepSeekV3Gate{}, bad.data(), 2); },
                 "route: logits[1, 3] is NaN; allowed: numbers and infinities");
  expect_refused([&] { route(DeepSeekV3Gate{}, zeros.data(), 1, bad.data() + 250); },
                 "route: correction_bias[9] is NaN; allowed: finite numbers");
}

TEST(SoftmaxGate, EqualsItsDefinition) {
  for (const SoftmaxGate gate : {SoftmaxGate{8, 2, true}, SoftmaxGate{8, 2, false}, SoftmaxGate{128, 8, true},
                                 SoftmaxGate{60, 4, false}, SoftmaxGate{5, 5, false}, SoftmaxGate{1, 1, true}}) {
    const std::vector<float> logits = normal(static_cast<size_t>(200) * gate.num_experts, 3, 3.0f);
    const Routing routing = route(gate, logits.data(), 200);
    for (int64_t t = 0; t < 200; ++t) expect_token(routing, t, expect_softmax(gate, logits.data() + t * gate.num_experts));
  }
}

TEST(SoftmaxGate, LargeLogitsDoNotOverflow) {
  const float logits[] = {3e38f, 2e38f, -3e38f};
  const Routing routing = route(SoftmaxGate{3, 3, false}, logits, 1);
  EXPECT_EQ(routing.topk_ids, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(routing.topk_weights, (std::vector<float>{1, 0, 0}));
}

TEST(SoftmaxGate, TiesAndMaskedExperts) {
  const float logits[] = {1, 2, 2, 2, -kInf, -kInf, -kInf, 5};
  const Routing routing = route(SoftmaxGate{8, 6, true}, logits, 1);
  EXPECT_EQ(routing.topk_ids, (std::vector<int32_t>{7, 1, 2, 3, 0, 4}));
  EXPECT_EQ(routing.topk_weights[1], routing.topk_weights[3]);
  EXPECT_EQ(routing.topk_weights[5], 0.0f);
}

TEST(SoftmaxGate, RefusesWhatItCannotDo) {
  const float logits[] = {0, kInf, kNan, -kInf, -kInf, -kInf};
  expect_refused([&] { route(SoftmaxGate{2, 3, true}, logits, 1); }, "route: topk is 3; allowed: 1 to 2");
  expect_refused(
      [&] {
        route(SoftmaxGate{2, 1, true}, logits, 1);
      },
      "route: logits[0, 1] is inf; allowed: finite numbers and -inf");
  expect_refused(
      [&] {
        route(SoftmaxGate{1, 1, true}, logits, 3);
      },
      "route: logits[1, 0] is inf; allowed: finite numbers and -inf");
  expect_refused(
      [&] {
        route(SoftmaxGate{3, 1, true}, logits + 3, 1);
      },
      "route: logits[0] is -inf for every expert; allowed: at least one finite logit");
}

TEST(PortableMath, IsAccurate) {
  for (double x = -744; x < 709; x += 0.37) {
    const double expected = std::exp(x), allowed = std::max(1e-15 * expected, 5e-324);
    ASSERT_NEAR(detail::portable_exp(x), expected, allowed) << x;
  }
  for (double x = 1e-300; x < 1e300; x *= 1.37)
    ASSERT_NEAR(detail::portable_log(x), std::log(x), 1e-15 * std::abs(std::log(x))) << x;
  for (int i = 1; i < 2000; ++i) ASSERT_NEAR(detail::portable_log(i), std::log(i), 2e-15 * std::log(i)) << i;
  EXPECT_EQ(detail::portable_exp(0), 1);
  EXPECT_EQ(detail::portable_log(1), 0);
  EXPECT_EQ(detail::portable_exp(-kInf), 0);
  EXPECT_EQ(detail::portable_exp(kInf), kInf);
  EXPECT_TRUE(std::isnan(detail::portable_exp(kNan)));
}

// The results have the same bits on every machine: they must never depend on the compiler or its flags.
TEST(PortableMath, KnownBits) {
  EXPECT_EQ(detail::portable_exp(1), 0x1.5bf0a8b14576ap+1);
  EXPECT_EQ(detail::portable_exp(-3.25), 0x1.3da368521902dp-5);
  EXPECT_EQ(detail::portable_log(10), 0x1.26bb1bbb55515p+1);
  EXPECT_EQ(detail::portable_log(0.3), -0x1.34378fcbda720p+0);
}

TEST(GateLogits, IsAMatrixProduct) {
  constexpr int64_t kTokens = 19, kHidden = 33, kExperts = 7;
  const std::vector<float> x = normal(kTokens * kHidden, 7, 1.0f), w = normal(kExperts * kHidden, 8, 1.0f);
  const std::vector<float> logits =
      gate_logits({x.data(), kTokens, kHidden, DType::f32}, {w.data(), kExperts, kHidden, DType::f32});
  ASSERT_EQ(logits.size(), static_cast<size_t>(kTokens * kExperts));
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t e = 0; e < kExperts; ++e) {
      float sum = 0;  // by contract float32, columns ascending
      for (int64_t h = 0; h < kHidden; ++h) sum += x[t * kHidden + h] * w[e * kHidden + h];
      EXPECT_EQ(logits[t * kExperts + e], sum);
    }
  }
}

TEST(GateLogits, WidensBf16AndF16) {
  const uint16_t bf16[] = {0x3F80, 0x4000, 0xBF80, 0x0000};  // 1, 2, -1, 0
  const uint16_t f16[] = {0x3C00, 0x3800, 0xC000, 0x4200};   // 1, 0.5, -2, 3
  EXPECT_EQ(gate_logits({bf16, 2, 2, DType::bf16}, {f16, 2, 2, DType::f16}), (std::vector<float>{2, 4, -1, 2}));
}

TEST(GateLogits, RefusesWhatItCannotDo) {
  const float x[4] = {};
  expect_refused(
      [&] {
        gate_logits({x, 1, 4, DType::f32}, {x, 1, 3, DType::f32});
      },
      "gate_logits: gate_weights.cols is 3; allowed: 4, as rows.cols");
  expect_refused(
      [&] {
        gate_logits({x, 1, 4, DType::fp8_e4m3}, {x, 1, 4, DType::f32});
      },
      "gate_logits: rows.dtype is fp8_e4m3; allowed: bf16, f16, f32");
  expect_refused(
      [&] {
        gate_logits({nullptr, 1, 4, DType::f32}, {x, 1, 4, DType::f32});
      },
      "gate_logits: rows.data is null; allowed: 1 * 4 elements");
  expect_refused(
      [&] {
        gate_logits({x, 1, -4, DType::f32}, {x, 1, -4, DType::f32});
      },
      "gate_logits: rows.cols is -4; allowed: 0 and above");
  EXPECT_TRUE(gate_logits({nullptr, 0, 4, DType::f32}, {x, 1, 4, DType::f32}).empty());
}

}  // namespace
}  // namespace switchyard

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/number_formats.hpp"
#include "routing/check.hpp"
#include "routing/portable_math.hpp"
#include "routing/top_k.hpp"
#include "switchyard/routing.hpp"

namespace switchyard {
namespace {

using detail::check_range;
using detail::portable_exp;
using detail::refuse;
using detail::TopK;

constexpr const char* kRoute = "route";

float sigmoid(float logit) {
  const double x = logit;
  if (x >= 0) return static_cast<float>(1 / (1 + portable_exp(-x)));
  const double e = portable_exp(x);
  return static_cast<float>(e / (1 + e));
}

std::string text_of(float value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return std::to_string(value);
}

std::string at(const char* array, int64_t token, int expert) {
  return std::string(array) + "[" + std::to_string(token) + ", " + std::to_string(expert) + "]";
}

void check_logits(const float* logits, int64_t tokens, int num_experts) {
  detail::check_tokens(kRoute, tokens, num_experts);
  if (logits == nullptr && tokens > 0) refuse(kRoute, "logits", "null", "float32 [tokens, num_experts]");
}

void check_gate(const DeepSeekV3Gate& gate, const float* correction_bias) {
  check_range(kRoute, "num_experts", gate.num_experts, 1, std::numeric_limits<int32_t>::max());
  check_range(kRoute, "num_groups", gate.num_groups, 1, gate.num_experts);
  if (gate.num_experts % gate.num_groups != 0) {
    refuse(kRoute, "num_groups", std::to_string(gate.num_groups),
           "divisors of num_experts " + std::to_string(gate.num_experts));
  }
  check_range(kRoute, "topk_groups", gate.topk_groups, 1, gate.num_groups);
  const int64_t eligible = int64_t{gate.topk_groups} * (gate.num_experts / gate.num_groups);
  check_range(kRoute, "topk", gate.topk, 1, std::min<int64_t>(kMaxTopk, eligible));
  if (!std::isfinite(gate.scaling)) refuse(kRoute, "scaling", text_of(gate.scaling), "finite numbers");
  for (int e = 0; correction_bias != nullptr && e < gate.num_experts; ++e) {
    if (!std::isfinite(correction_bias[e])) {
      refuse(kRoute, "correction_bias[" + std::to_string(e) + "]", text_of(correction_bias[e]), "finite numbers");
    }
  }
}

/// Sum of the two largest elements of `values`, or the only element.
float group_score(std::span<const float> values) {
  float first = values[0], second = -std::numeric_limits<float>::infinity();
  for (size_t i = 1; i < values.size(); ++i) {
    if (values[i] > first) {
      second = first;
      first = values[i];
    } else if (values[i] > second) {
      second = values[i];
    }
  }
  return values.size() == 1 ? first : first + second;
}

/// Scores of one token, and buffers for selecting from them; reused for all tokens.
struct DeepSeekV3Token {
  std::vector<float> scores, choice;
  TopK groups, experts;
  std::vector<uint8_t> kept;

  explicit DeepSeekV3Token(const DeepSeekV3Gate& gate)
      : scores(static_cast<size_t>(gate.num_experts)),
        choice(static_cast<size_t>(gate.num_experts)),
        groups(gate.topk_groups),
        experts(gate.topk),
        kept(static_cast<size_t>(gate.num_groups)) {}

  void score(const float* logits, int64_t token, const float* correction_bias) {
    for (size_t e = 0; e < scores.size(); ++e) {
      if (std::isnan(logits[e])) refuse(kRoute, at("logits", token, static_cast<int>(e)), "NaN", "numbers and infinities");
      scores[e] = sigmoid(logits[e]);
      choice[e] = correction_bias != nullptr ? scores[e] + correction_bias[e] : scores[e];
    }
  }

  std::span<const int32_t> choose() {
    const size_t group_size = choice.size() / kept.size();
    groups.clear();
    for (size_t g = 0; g < kept.size(); ++g) {
      groups.offer(static_cast<int32_t>(g), group_score(std::span(choice).subspan(g * group_size, group_size)));
    }
    std::fill(kept.begin(), kept.end(), uint8_t{0});
    for (const int32_t g : groups.indices()) kept[static_cast<size_t>(g)] = 1;
    experts.clear();
    for (size_t e = 0; e < choice.size(); ++e) {
      if (kept[e / group_size] != 0) experts.offer(static_cast<int32_t>(e), choice[e]);
    }
    return experts.indices();
  }
};

void check_softmax_logits(const float* logits, int64_t token, int num_experts) {
  bool any_finite = false;
  for (int e = 0; e < num_experts; ++e) {
    if (std::isnan(logits[e]) || (std::isinf(logits[e]) && logits[e] > 0)) {
      refuse(kRoute, at("logits", token, e), text_of(logits[e]), "finite numbers and -inf");
    }
    any_finite |= std::isfinite(logits[e]);
  }
  if (!any_finite)
    refuse(kRoute, "logits[" + std::to_string(token) + "]", "-inf for every expert", "at least one finite logit");
}

void check_rows(const ConstRows& rows, const char* name) {
  const std::string what = std::string(name);
  if (dtype_has_scales(rows.dtype)) refuse("gate_logits", what + ".dtype", to_string(rows.dtype), "bf16, f16, f32");
  detail::check_tokens("gate_logits", rows.rows, std::max<int64_t>(rows.cols, 1));
  if (rows.cols < 0) refuse("gate_logits", what + ".cols", std::to_string(rows.cols), "0 and above");
  if (rows.data == nullptr && rows.rows > 0 && rows.cols > 0) {
    refuse("gate_logits", what + ".data", "null", std::to_string(rows.rows) + " * " + std::to_string(rows.cols) + " elements");
  }
}

}  // namespace

Routing route(const DeepSeekV3Gate& gate, const float* logits, int64_t tokens, const float* correction_bias) {
  check_gate(gate, correction_bias);
  check_logits(logits, tokens, gate.num_experts);
  Routing routing = detail::make_routing(kRoute, gate.num_experts, gate.topk, tokens, true);
  DeepSeekV3Token state(gate);
  for (int64_t t = 0; t < tokens; ++t) {
    state.score(logits + t * gate.num_experts, t, correction_bias);
    const std::span<const int32_t> chosen = state.choose();
    float sum = 0;
    for (const int32_t e : chosen) sum += state.scores[static_cast<size_t>(e)];
    sum += 1e-20f;
    for (size_t k = 0; k < chosen.size(); ++k) {
      const size_t route_idx = static_cast<size_t>(t) * chosen.size() + k;
      const float score = state.scores[static_cast<size_t>(chosen[k])];
      routing.topk_ids[route_idx] = chosen[k];
      routing.topk_weights[route_idx] = (gate.normalize ? score / sum : score) * gate.scaling;
    }
  }
  return routing;
}

Routing route(const SoftmaxGate& gate, const float* logits, int64_t tokens) {
  check_range(kRoute, "num_experts", gate.num_experts, 1, std::numeric_limits<int32_t>::max());
  check_range(kRoute, "topk", gate.topk, 1, std::min(gate.num_experts, kMaxTopk));
  check_logits(logits, tokens, gate.num_experts);
  Routing routing = detail::make_routing(kRoute, gate.num_experts, gate.topk, tokens, true);
  TopK experts(gate.topk);
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = logits + t * gate.num_experts;
    check_softmax_logits(row, t, gate.num_experts);
    experts.clear();
    for (int e = 0; e < gate.num_experts; ++e) experts.offer(e, row[e]);
    const std::span<const int32_t> chosen = experts.indices();
    const double largest = row[chosen[0]];
    double sum = 0;
    if (gate.renormalize) {
      for (const int32_t e : chosen) sum += portable_exp(row[e] - largest);
    } else {
      for (int e = 0; e < gate.num_experts; ++e) sum += portable_exp(row[e] - largest);
    }
    for (size_t k = 0; k < chosen.size(); ++k) {
      const size_t route_idx = static_cast<size_t>(t) * chosen.size() + k;
      routing.topk_ids[route_idx] = chosen[k];
      routing.topk_weights[route_idx] = static_cast<float>(portable_exp(row[chosen[k]] - largest) / sum);
    }
  }
  return routing;
}

std::vector<float> gate_logits(const ConstRows& rows, const ConstRows& gate_weights) {
  check_rows(rows, "rows");
  check_rows(gate_weights, "gate_weights");
  if (rows.cols != gate_weights.cols) {
    refuse("gate_logits", "gate_weights.cols", std::to_string(gate_weights.cols), std::to_string(rows.cols) + ", as rows.cols");
  }
  const int64_t experts = gate_weights.rows, hidden = rows.cols;
  detail::check_tokens("gate_logits", rows.rows, std::max<int64_t>(experts, 1));
  // Weights are stored as [hidden, experts]: the inner loop runs over experts, so that each sum keeps its order and the loop
  // can still be vectorized.
  std::vector<float> transposed(static_cast<size_t>(hidden * experts));
  for (int64_t e = 0; e < experts; ++e) {
    const std::byte* row = static_cast<const std::byte*>(gate_weights.data) + e * dtype_bytes(gate_weights.dtype, hidden);
    for (int64_t h = 0; h < hidden; ++h) transposed[h * experts + e] = detail::load_element(row, gate_weights.dtype, h);
  }
  std::vector<float> logits(static_cast<size_t>(rows.rows * experts), 0.0f);
  constexpr int64_t kTokens = 8;  // tokens that share one pass over the weights
  for (int64_t first = 0; first < rows.rows; first += kTokens) {
    const int64_t last = std::min(first + kTokens, rows.rows);
    for (int64_t h = 0; h < hidden; ++h) {
      const float* weight = transposed.data() + h * experts;
      for (int64_t t = first; t < last; ++t) {
        const std::byte* row = static_cast<const std::byte*>(rows.data) + t * dtype_bytes(rows.dtype, hidden);
        const float x = detail::load_element(row, rows.dtype, h);
        float* sums = logits.data() + t * experts;
        for (int64_t e = 0; e < experts; ++e) sums[e] += x * weight[e];
      }
    }
  }
  return logits;
}

}  // namespace switchyard

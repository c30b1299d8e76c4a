// SPDX-License-Identifier: Apache-2.0
// A layer as separate calls (dispatch, ExpertMlp, combine), with nothing copied between them, and its float64 reference result.
// The code is shared by both backends and both modes: the tests for each backend supply a Rig, which has a rank's memory and
// stream.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "oracle/numbers.hpp"
#include "switchyard/expert.hpp"
#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::testing {

struct LayerCase {
  std::string name;
  bool masked = false;  ///< low latency, rows in the memory in which they were delivered; otherwise normal mode, expert-major
  DType type = DType::bf16;
  int experts = 5;
  int topk = 3;
  int64_t hidden = 256, intermediate = 136;
  std::vector<int64_t> tokens;  ///< of each rank
  int idle = -1;                ///< the expert that no token chooses
  int only = -1;                ///< the expert that all tokens choose with all their routes; -1: any expert
  int world() const { return static_cast<int>(tokens.size()); }
  int64_t max_tokens() const { return *std::max_element(tokens.begin(), tokens.end()); }
  size_t row_bytes() const { return dtype_bytes(type, hidden); }
  /// Bound of |out - reference| / |reference|, with Euclidean norms of a rank's whole output. Each of four roundings is at most
  /// half a unit in the last of 8 digits (f16: 11 digits).
  double tolerance() const { return type == DType::bf16 ? 1e-2 : 1.25e-3; }

  NormalConfig normal() const {
    NormalConfig config;
    config.hidden = hidden;
    config.num_experts = experts;
    config.topk = topk;
    config.max_tokens = max_tokens();
    config.layout = Layout::expert_major;
    config.expert_alignment = 4;
    config.dtype = type;
    // A graph retains the allocations made by its calls, in addition to earlier ones.
    config.pool_bytes = 2 * NormalExchange::memory_required(config, world(), Backend::cuda).pool_bytes;
    return config;
  }
  LowLatencyConfig low_latency() const {
    LowLatencyConfig config;
    config.hidden = hidden;
    config.num_experts = experts;
    config.topk = topk;
    config.max_tokens = max_tokens();
    config.dtype = type;
    config.scales = ScaleKind::none;
    return config;
  }
  size_t heap_bytes(Backend backend) const {
    return masked ? LowLatencyExchange::heap_bytes(low_latency(), world())
                  : NormalExchange::heap_bytes(normal(), world(), backend);
  }
};

/// For GoogleTest.
inline void PrintTo(const LayerCase& c, std::ostream* out) { *out << c.name; }

/// Cases with two ranks: both have tokens, one has no tokens, an expert has no rows, or a rank has no experts.
inline std::vector<LayerCase> layer_cases() {
  std::vector<LayerCase> all;
  for (const bool masked : {false, true}) {
    const std::string mode = masked ? "masked_" : "normal_";
    all.push_back({.name = mode + "all", .masked = masked, .tokens = {70, 33}});
    all.push_back({.name = mode + "no_tokens", .masked = masked, .tokens = {41, 0}});
    all.push_back({.name = mode + "idle_expert", .masked = masked, .tokens = {20, 23}, .idle = 3});
    all.push_back({.name = mode + "no_experts", .masked = masked, .experts = 1, .topk = 1, .tokens = {9, 6}});
  }
  return all;
}

/// `n` normally distributed values of `type`.
inline std::vector<std::byte> normal_rows(DType type, int64_t n, double deviation, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> pick(0.0f, static_cast<float>(deviation));
  std::vector<std::byte> out(dtype_bytes(type, n));
  for (int64_t i = 0; i < n; ++i) oracle::store(type, out.data(), i, pick(random));
  return out;
}

/// Input of rank `rank` for call `call`. One choice in twelve is not an expert.
struct LayerInput {
  std::vector<std::byte> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  LayerInput(const LayerCase& c, uint32_t call, int rank) {
    const uint32_t seed = 1000 * call + static_cast<uint32_t>(rank);
    const int64_t tokens = c.tokens[static_cast<size_t>(rank)];
    x = normal_rows(c.type, tokens * c.hidden, 1, seed);
    std::mt19937 random(seed + 500);
    for (int64_t i = 0; i < tokens * c.topk; ++i) {
      const int id = static_cast<int>(random() % static_cast<uint32_t>(c.experts));
      ids.push_back(id == c.idle || random() % 12 == 0 ? -1 : c.only >= 0 ? c.only : id);
      weights.push_back(0.25f + static_cast<float>(random() % 100) / 128);
    }
  }
};

/// Weights of one expert, identical on every rank.
struct LayerWeights {
  std::vector<std::byte> w13, w2;
  LayerWeights(const LayerCase& c, int expert)
      : w13(normal_rows(c.type, 2 * c.intermediate * c.hidden, 1 / std::sqrt(static_cast<double>(c.hidden)),
                        static_cast<uint32_t>(7000 + 2 * expert))),
        w2(normal_rows(c.type, c.hidden * c.intermediate, 1 / std::sqrt(static_cast<double>(c.intermediate)),
                       static_cast<uint32_t>(7001 + 2 * expert))) {}
};

/// Returns the result [tokens, H] of `rank` in call `call`, in float64 without intermediate rounding. `dropped` [tokens, topk]
/// marks routes that contribute nothing; it may be empty.
inline std::vector<double> layer_reference(const LayerCase& c, uint32_t call, int rank,
                                           const std::vector<uint8_t>& dropped = {}) {
  const auto h = static_cast<size_t>(c.hidden), width = static_cast<size_t>(c.intermediate);
  const auto widened = [&](const std::vector<std::byte>& from) {
    std::vector<double> out(8 * from.size() / static_cast<size_t>(dtype_bits(c.type)));
    for (size_t i = 0; i < out.size(); ++i)
      out[i] = static_cast<double>(oracle::load(c.type, from.data(), static_cast<int64_t>(i)));
    return out;
  };
  const auto dot = [](const double* a, const double* b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
  };
  const LayerInput input(c, call, rank);
  const std::vector<double> x = widened(input.x);
  std::vector<double> out(x.size()), between(width);
  for (int e = 0; e < c.experts; ++e) {
    const LayerWeights weights(c, e);
    const std::vector<double> w13 = widened(weights.w13), w2 = widened(weights.w2);
    for (size_t f = 0; f < input.ids.size(); ++f) {
      if (input.ids[f] != e || (!dropped.empty() && dropped[f] != 0)) continue;
      const size_t row = f / static_cast<size_t>(c.topk) * h;
      for (size_t i = 0; i < width; ++i) {
        const double gate = dot(&w13[i * h], &x[row], h), up = dot(&w13[(width + i) * h], &x[row], h);
        between[i] = gate / (1 + std::exp(-gate)) * up;
      }
      for (size_t i = 0; i < h; ++i)
        out[row + i] += static_cast<double>(input.weights[f]) * dot(&w2[i * width], between.data(), width);
    }
  }
  return out;
}

/// Objects and memory of one rank. Construction and destruction are collective: all ranks are idle at those points.
///
/// A Rig has: static constexpr Backend kBackend; void* room(bytes), which returns memory that lasts as long as the Rig;
/// write(to, from, bytes) and read(to, from, bytes), which access this memory while no call is in flight; and void* stream().
template <class Rig>
class ExpertLayer {
 public:
  ExpertLayer(Rig& rig, Group& group, const LayerCase& c) : rig_(rig), c_(c), rank_(group.rank()) {
    const auto tokens = static_cast<size_t>(c.max_tokens()), routes = tokens * static_cast<size_t>(c.topk);
    x_ = rig.allocate(tokens * c.row_bytes());
    out_ = rig.allocate(tokens * c.row_bytes());
    ids_ = static_cast<int32_t*>(rig.allocate(routes * 4));
    weights_ = static_cast<float*>(rig.allocate(routes * 4));
    if (c.masked) {
      low_latency_.emplace(group, c.low_latency());
      received_ = low_latency_->make_output();
      made_ = low_latency_->make_rows(c.type);
    } else {
      normal_.emplace(group, c.normal());
    }
    make_experts(first_expert(c.experts, c.world(), rank_), first_expert(c.experts, c.world(), rank_ + 1));
  }

  /// Sets the inputs of subsequent calls.
  void write(uint32_t call) {
    const LayerInput input(c_, call, rank_);
    rig_.write(x_, input.x.data(), input.x.size());
    rig_.write(ids_, input.ids.data(), input.ids.size() * 4);
    rig_.write(weights_, input.weights.data(), input.weights.size() * 4);
  }

  /// Collective.
  void call() {
    const int64_t tokens = c_.tokens[static_cast<size_t>(rank_)];
    const ConstRows x{x_, tokens, c_.hidden, c_.type};
    const ExpertIds ids = ExpertIds::of(ids_, tokens, c_.topk);
    const ExpertCall experts{.stream = rig_.stream()};
    if (c_.masked) {
      low_latency_->dispatch(x, ids, received_, {.topk_weights = weights_, .stream = rig_.stream()});
      experts_->forward(received_.x, ExpertRows::of(received_), made_, experts);
      low_latency_->combine(made_, received_, out_, {.stream = rig_.stream()});
      return;
    }
    DispatchOptions send;
    send.stream = rig_.stream();
    CombineOptions back;
    back.stream = rig_.stream();
    const Dispatched d = normal_->dispatch(x, ids, weights_, send);
    const RowBuffer y = normal_->allocate_rows(d.handle, c_.type, rig_.stream());
    experts_->forward(d.x, ExpertRows::of(d), y.rows(), experts);
    normal_->combine(y.rows(), d.handle, out_, back);
  }

  /// Returns an empty string, or how the result differs from the expected result of call `call`.
  std::string judge(uint32_t call) {
    const std::vector<double> exact = layer_reference(c_, call, rank_);
    std::vector<std::byte> got(dtype_bytes(c_.type, static_cast<int64_t>(exact.size())));
    rig_.read(got.data(), out_, got.size());
    double error = 0, norm = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      const double d = static_cast<double>(oracle::load(c_.type, got.data(), static_cast<int64_t>(i))) - exact[i];
      error += d * d;
      norm += exact[i] * exact[i];
    }
    if (exact.empty() || (norm > 0 && std::sqrt(error / norm) <= c_.tolerance())) return "";
    return c_.name + ", call " + std::to_string(call) + ", rank " + std::to_string(rank_) + ": off by " +
           std::to_string(std::sqrt(error)) + ", the reference has a norm of " + std::to_string(std::sqrt(norm));
  }

  ExpertMlp& experts() { return *experts_; }

 private:
  void make_experts(int first, int end) {
    const ExpertShape shape{c_.hidden, c_.intermediate, end - first};
    ExpertOptions options;
    options.backend = Rig::kBackend;
    options.dtype = c_.type;
    options.storage = WeightStorage::view;
    options.max_rows = c_.masked ? received_.x.rows : max_rows(c_.normal(), c_.world());
    const auto bytes = dtype_bytes(c_.type, c_.hidden * c_.intermediate);
    const auto here = static_cast<size_t>(end - first);
    auto* const w13 = static_cast<std::byte*>(rig_.allocate(2 * here * bytes));
    auto* const w2 = static_cast<std::byte*>(rig_.allocate(here * bytes));
    for (int e = first; e < end; ++e) {
      const LayerWeights weights(c_, e);
      const auto at = static_cast<size_t>(e - first) * bytes;
      rig_.write(w13 + 2 * at, weights.w13.data(), 2 * bytes);
      rig_.write(w2 + at, weights.w2.data(), bytes);
    }
    experts_.emplace(shape, reinterpret_cast<const uint16_t*>(w13), reinterpret_cast<const uint16_t*>(w2), options);
  }

  Rig& rig_;
  LayerCase c_;
  int rank_;
  void *x_ = nullptr, *out_ = nullptr;
  int32_t* ids_ = nullptr;
  float* weights_ = nullptr;
  std::optional<NormalExchange> normal_;
  std::optional<LowLatencyExchange> low_latency_;
  LowLatencyOutput received_;
  LowLatencyRows made_;
  std::optional<ExpertMlp> experts_;
};

}  // namespace switchyard::testing

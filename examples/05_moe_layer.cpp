// SPDX-License-Identifier: Apache-2.0
// A complete MoE layer over three ranks that are threads of this process, with one object for prefill and another for decoding.
// Both share one copy of the weights. When the layer is called, `out` already contains the output rows of a shared expert. On
// GPUs, the calls are the same but take device pointers and a stream, and can be captured in a graph.
//
// The result must equal the formula, evaluated on the token's rank, within bf16 rounding.
#include <switchyard/layer.hpp>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <exception>
#include <thread>
#include <vector>

using namespace switchyard;

constexpr int kRanks = 3, kExperts = 7, kTopk = 2, kHidden = 64, kIntermediate = 48;
constexpr int64_t kPrompt = 300, kDecoded = 4;

// --- Data of every token, computable on every rank.

float token(int rank, int64_t t, int column) {
  return std::sin(static_cast<float>(rank + 1) * 0.7f + static_cast<float>(t) * 1.3f + static_cast<float>(column));
}
int expert(int rank, int64_t t, int k) {
  const auto e = static_cast<int>((rank + 3 * t + 5 * k) % (kExperts + 1));
  return e < kExperts ? e : -1;  // -1: no expert
}
float token_weight(int k) { return k == 0 ? 0.75f : 0.25f; }
float shared_row(int64_t t, int column) { return std::cos(static_cast<float>(t) + static_cast<float>(column)); }

uint16_t to_bf16(float value) {  // nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
float rounded(float value) { return from_bf16(to_bf16(value)); }

/// Adds an expert's weighted outputs for one token to `sum` [H].
void add_expert(const ExpertWeights& weights, int e, const std::vector<float>& x, double weight, std::vector<double>& sum) {
  std::vector<double> between(kIntermediate);
  for (int i = 0; i < kIntermediate; ++i) {
    double gate = 0, up = 0;
    for (size_t c = 0; c < kHidden; ++c) {
      gate += static_cast<double>(from_bf16(weights.w13(e, i, static_cast<int64_t>(c))) * x[c]);
      up += static_cast<double>(from_bf16(weights.w13(e, kIntermediate + i, static_cast<int64_t>(c))) * x[c]);
    }
    between[static_cast<size_t>(i)] = gate / (1 + std::exp(-gate)) * up;
  }
  for (size_t c = 0; c < kHidden; ++c)
    for (int i = 0; i < kIntermediate; ++i)
      sum[c] +=
          weight * static_cast<double>(from_bf16(weights.w2(e, static_cast<int64_t>(c), i))) * between[static_cast<size_t>(i)];
}

// --- One rank.

/// Calls `layer` with `tokens` tokens. Returns the relative deviation from the formula.
double call(MoeLayer& layer, int rank, int64_t tokens, const ExpertWeights& weights) {
  std::vector<uint16_t> x, out;
  std::vector<int32_t> ids;
  std::vector<float> route_weights;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int c = 0; c < kHidden; ++c) x.push_back(to_bf16(token(rank, t, c)));
    for (int c = 0; c < kHidden; ++c) out.push_back(to_bf16(shared_row(t, c)));
    for (int k = 0; k < kTopk; ++k) ids.push_back(expert(rank, t, k));
    for (int k = 0; k < kTopk; ++k) route_weights.push_back(token_weight(k));
  }
  layer.forward(x.data(), ExpertIds::of(ids.data(), tokens, kTopk), route_weights.data(), out.data(), {.add = true});

  double error = 0, norm = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<float> row(kHidden);
    std::vector<double> sum(kHidden);
    for (int c = 0; c < kHidden; ++c) {
      row[static_cast<size_t>(c)] = rounded(token(rank, t, c));
      sum[static_cast<size_t>(c)] = static_cast<double>(rounded(shared_row(t, c)));
    }
    for (int k = 0; k < kTopk; ++k)
      if (expert(rank, t, k) >= 0) add_expert(weights, expert(rank, t, k), row, static_cast<double>(token_weight(k)), sum);
    for (size_t c = 0; c < kHidden; ++c) {
      const double d = static_cast<double>(from_bf16(out[static_cast<size_t>(t) * kHidden + c])) - sum[c];
      error += d * d;
      norm += sum[c] * sum[c];
    }
  }
  return std::sqrt(error / norm);
}

bool run_rank(Group& group, const MoeLayerConfig& prefill, const MoeLayerConfig& decode) {
  const int rank = group.rank(), first = first_expert(kExperts, kRanks, rank), end = first_expert(kExperts, kRanks, rank + 1);
  const ExpertWeights weights(1, kHidden, kIntermediate);
  constexpr size_t kMatrix = size_t{kHidden} * kIntermediate;
  std::vector<uint16_t> w13(static_cast<size_t>(end - first) * 2 * kMatrix), w2(static_cast<size_t>(end - first) * kMatrix);
  for (int e = first; e < end; ++e) {
    const auto at = static_cast<size_t>(e - first) * kMatrix;
    weights.fill(e, {w13.data() + 2 * at, 2 * kMatrix}, {w2.data() + at, kMatrix});
  }
  MoeLayer many(group, prefill, w13.data(), w2.data());  // collective
  MoeLayer few(group, decode, w13.data(), w2.data());
  const double prompt = call(many, rank, kPrompt + rank, weights);
  const double decoded = call(few, rank, kDecoded - rank, weights);
  if (rank == 0) std::printf("prefill: %s\ndecoding: %s\n", many.implementation().c_str(), few.implementation().c_str());
  std::printf("rank %d is off by %.2f %% and %.2f %%\n", rank, 100 * prompt, 100 * decoded);
  return prompt < 0.01 && decoded < 0.01;
}

int main() try {
  MoeLayerConfig prefill;
  prefill.hidden = kHidden;
  prefill.intermediate = kIntermediate;
  prefill.num_experts = kExperts;
  prefill.topk = kTopk;
  prefill.max_tokens = kPrompt + kRanks;
  prefill.storage = WeightStorage::view;  // both layers read the caller's weights
  MoeLayerConfig decode = prefill;
  decode.max_tokens = kDecoded;  // few enough for a low-latency exchange
  GroupOptions options;
  options.heap_bytes = MoeLayer::heap_bytes(prefill, kRanks) + MoeLayer::heap_bytes(decode, kRanks);
  std::vector<Group> groups = Group::in_process(kRanks, options);
  std::atomic<int> wrong{0};
  std::vector<std::thread> ranks;
  for (Group& group : groups) {
    ranks.emplace_back([&] {
      try {
        wrong += run_rank(group, prefill, decode) ? 0 : 1;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", group.rank(), error.what());
        wrong += 1;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  std::printf("%s\n", wrong == 0 ? "PASS" : "FAIL");
  return wrong == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

// SPDX-License-Identifier: Apache-2.0
// A decode layer over three ranks that are threads of this process. It consists of low-latency dispatch (bf16 tokens travel as
// fp8), a masked grouped matrix product that reads rows, counts and scales exactly as delivered, and combine, which reads the
// products directly from the memory written by the experts. Runs once for each scale format. On GPUs, the calls are the same
// but take device pointers, and the counts stay on the device.
//
// Tokens are exactly representable in fp8: small integers times a power of two for each group of 128 columns. Each group also
// has one element equal to 448 (the largest fp8 number) times that power. The result must therefore equal that of plain
// arithmetic, bit by bit.
#include <switchyard/low_latency.hpp>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

using namespace switchyard;

constexpr int kRanks = 3, kExperts = 8, kTopk = 3, kMaxTokens = 5, kHidden = 384, kSteps = 3;

// --- Data of every token and expert, computable on every rank.

int tokens(int step, int rank) { return (2 * step + 3 * rank) % (kMaxTokens + 1); }  // including zero
int expert(int step, int rank, int t, int k) {
  const int e = (step + 5 * rank + t + 3 * k) % (kExperts + 1);
  return e < kExperts ? e : -1;  // -1: no expert
}
float token_weight(int k) { return k == 0 ? 0.5f : 0.25f; }
float token(int step, int rank, int t, int column) {
  const int group = column / kScaleGroup;
  const int number = column % kScaleGroup == t ? 448 : (step + 7 * rank + 3 * t + column) % 7 - 3;
  return std::ldexp(static_cast<float>(number), (rank + t + group) % 4 - 2);
}
float matrix(int e, int row, int column) { return static_cast<float>((e + 2 * row + 3 * column) % 3 - 1); }  // [H out, H in]

uint16_t to_bf16(float value) {  // nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
float from_fp8(uint8_t bits) {
  const int exponent = bits >> 3 & 15, digits = bits & 7;
  const float magnitude =
      exponent == 0 ? std::ldexp(static_cast<float>(digits), -9) : std::ldexp(static_cast<float>(8 + digits), exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// --- Experts: one masked grouped product.

// The scale of columns [128 g, 128 g + 128) of row r of expert e, at the position written by dispatch.
float scale_of(const LowLatencyOutput& in, const LowLatencyConfig& config, int64_t e, int64_t r, int64_t g) {
  const bool packed = config.scales == ScaleKind::ue8m0;  // one byte: the exponent of a power of two
  const int64_t groups = num_scales(kHidden);
  int64_t byte;
  if (config.scale_order == ScaleOrder::row_major) {
    const auto row_bytes = static_cast<int64_t>(scale_row_bytes(kHidden, config.scales));
    byte = (e * in.rows_per_expert + r) * row_bytes + (packed ? g : 4 * g);
  } else if (packed) {  // four groups per word
    byte = ((e * ((groups + 3) / 4) + g / 4) * in.scale_rows + r) * 4 + g % 4;
  } else {
    byte = ((e * groups + g) * in.scale_rows + r) * 4;
  }
  const auto* const at = static_cast<const uint8_t*>(in.x.scales) + byte;
  if (packed) return std::ldexp(1.0f, *at - 127);
  float scale;
  std::memcpy(&scale, at, sizeof scale);
  return scale;
}

// y[row] = matrix of the row's expert * row, for all valid rows.
void masked_grouped_product(const LowLatencyOutput& in, const LowLatencyConfig& config, int first_expert, int experts,
                            const LowLatencyRows& y) {
  const auto* const codes = static_cast<const uint8_t*>(in.x.data);
  auto* const out = static_cast<uint16_t*>(y.data);
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t r = 0; r < in.rows_of_expert[e]; ++r) {  // rows beyond these are undefined
      const int64_t row = e * in.rows_per_expert + r;
      float x[kHidden];
      for (int c = 0; c < kHidden; ++c) x[c] = from_fp8(codes[row * kHidden + c]) * scale_of(in, config, e, r, c / kScaleGroup);
      for (int n = 0; n < kHidden; ++n) {
        float sum = 0;
        for (int c = 0; c < kHidden; ++c) sum += matrix(first_expert + static_cast<int>(e), n, c) * x[c];
        out[row * kHidden + n] = to_bf16(sum);
      }
    }
  }
}

// --- One rank.

// Number of elements that differ from those of the same layer computed on the token's rank without any exchange.
int wrong_elements(int step, int rank, int t, const uint16_t* out) {
  int wrong = 0;
  float x[kHidden];
  for (int c = 0; c < kHidden; ++c) x[c] = token(step, rank, t, c);
  for (int n = 0; n < kHidden; ++n) {
    float sum = 0;
    for (int k = 0; k < kTopk; ++k) {
      const int e = expert(step, rank, t, k);
      if (e < 0) continue;
      double product = 0;
      for (int c = 0; c < kHidden; ++c) product += matrix(e, n, c) * x[c];
      sum += token_weight(k) * from_bf16(to_bf16(static_cast<float>(product)));
    }
    wrong += out[n] != to_bf16(sum);
  }
  return wrong;
}

int run_rank(Group& group, const LowLatencyConfig& config) {
  const int rank = group.rank(), first = first_expert(kExperts, kRanks, rank);
  LowLatencyExchange exchange(group, config);          // collective
  LowLatencyOutput received = exchange.make_output();  // allocated once, used by every step
  LowLatencyRows y = exchange.make_rows(DType::bf16);  // for the products, [local experts * R, H]
  std::vector<uint16_t> x(kMaxTokens * kHidden), out(kMaxTokens * kHidden);
  std::vector<int32_t> ids(kMaxTokens * kTopk);
  std::vector<float> weights(kMaxTokens * kTopk);
  int wrong = 0;
  for (int step = 0; step < kSteps; ++step) {
    const int count = tokens(step, rank);
    for (int i = 0; i < count * kHidden; ++i) x[static_cast<size_t>(i)] = to_bf16(token(step, rank, i / kHidden, i % kHidden));
    for (int f = 0; f < count * kTopk; ++f) {
      ids[static_cast<size_t>(f)] = expert(step, rank, f / kTopk, f % kTopk);
      weights[static_cast<size_t>(f)] = token_weight(f % kTopk);
    }
    LowLatencyDispatchOptions send;
    send.topk_weights = weights.data();
    exchange.dispatch({x.data(), count, kHidden, DType::bf16}, ExpertIds::of(ids.data(), count, kTopk), received, send);
    masked_grouped_product(received, config, first, first_expert(kExperts, kRanks, rank + 1) - first, y);
    exchange.combine(y, received, out.data());  // reads y in place
    for (int t = 0; t < count; ++t) wrong += wrong_elements(step, rank, t, out.data() + t * kHidden);
  }
  return wrong;
}

int run_layer(const LowLatencyConfig& config) {
  GroupOptions options;
  options.heap_bytes = LowLatencyExchange::heap_bytes(config, kRanks);
  std::vector<Group> groups = Group::in_process(kRanks, options);
  std::atomic<int> wrong{0};
  std::vector<std::thread> ranks;
  for (Group& group : groups) {
    ranks.emplace_back([&] {
      try {
        wrong += run_rank(group, config);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", group.rank(), error.what());
        wrong += 1;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return wrong;
}

int main() try {
  LowLatencyConfig config;
  config.hidden = kHidden;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.max_tokens = kMaxTokens;
  int failed = 0;
  for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0}) {
    for (const ScaleOrder order : {ScaleOrder::row_major, ScaleOrder::column_major}) {
      config.scales = kind;
      config.scale_order = order;
      const int wrong = run_layer(config);
      std::printf("%d steps of %d ranks, %s scales, %s: %s\n", kSteps, kRanks, kind == ScaleKind::f32 ? "float32" : "UE8M0",
                  order == ScaleOrder::row_major ? "row-major" : "column-major", wrong == 0 ? "PASS" : "FAIL");
      failed += wrong != 0;
    }
  }
  return failed == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

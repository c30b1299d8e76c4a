// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <string>

#include "base/number_formats.hpp"
#include "switchyard/expert.hpp"

namespace switchyard {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr uint64_t kGateUp = 13, kDown = 2;  // distinguish the two matrices of an expert
constexpr int64_t kPerWord = 8;              // number of elements that one 64-bit word determines, one byte each

/// A bijection on 64-bit words: changing one input bit changes about half of the output bits (finalizer of splitmix64).
constexpr uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr uint64_t row_key(uint64_t seed, uint64_t matrix, int64_t expert, int64_t row) {
  return mix(mix(mix(seed + matrix * kGolden) + static_cast<uint64_t>(expert)) + static_cast<uint64_t>(row));
}

constexpr uint64_t word(uint64_t key, int64_t index) { return mix(key + static_cast<uint64_t>(index + 1) * kGolden); }

uint16_t element(const uint16_t* levels, uint64_t key, int64_t col) {
  return levels[(word(key, col / kPerWord) >> (col % kPerWord * 8)) & 0xFF];
}

void fill_row(const uint16_t* levels, uint64_t key, int64_t cols, uint16_t* out) {
  const int64_t whole = cols / kPerWord * kPerWord;
  for (int64_t col = 0; col < whole; col += kPerWord) {
    uint64_t bytes = word(key, col / kPerWord);
    for (int64_t i = 0; i < kPerWord; ++i, bytes >>= 8) out[col + i] = levels[bytes & 0xFF];
  }
  for (int64_t col = whole; col < cols; ++col) out[col] = element(levels, key, col);
}

/// Symmetric, equally spaced levels in [-amplitude, amplitude].
void make_levels(double amplitude, int count, uint16_t* levels) {
  for (int i = 0; i < count; ++i) {
    const double unit = static_cast<double>(2 * i - (count - 1)) / (count - 1);
    levels[i] = detail::bf16_from_f32(static_cast<float>(amplitude * unit));
  }
}

void require_size(const char* name, size_t given, int64_t needed) {
  if (given == static_cast<size_t>(needed)) return;
  throw Error(ErrorCode::invalid_argument, std::string("ExpertWeights::fill: ") + name + " has " + std::to_string(given) +
                                               " elements; allowed: " + std::to_string(needed));
}

}  // namespace

ExpertWeights::ExpertWeights(uint64_t seed, int64_t hidden, int64_t intermediate)
    : seed_(seed), hidden_(hidden), intermediate_(intermediate) {
  if (hidden < 1 || intermediate < 1) {
    throw Error(ErrorCode::invalid_argument, "ExpertWeights: hidden and intermediate are " + std::to_string(hidden) + " and " +
                                                 std::to_string(intermediate) + "; allowed: >= 1");
  }
  // A uniform variable on [-a, a] has variance a^2 / 3. The gate and up weights have variance 1 / H, so that x W^T has variance
  // 1. For unit normal g, the mean of silu(g)^2 is 0.3557, so W2 with variance 1 / (0.3557 I) restores variance 1 in the
  // output.
  make_levels(std::sqrt(3.0 / static_cast<double>(hidden)), kLevels, levels13_);
  make_levels(std::sqrt(3.0 / (0.3557 * static_cast<double>(intermediate))), kLevels, levels2_);
}

uint16_t ExpertWeights::w13(int64_t expert, int64_t row, int64_t col) const noexcept {
  return element(levels13_, row_key(seed_, kGateUp, expert, row), col);
}

uint16_t ExpertWeights::w2(int64_t expert, int64_t row, int64_t col) const noexcept {
  return element(levels2_, row_key(seed_, kDown, expert, row), col);
}

void ExpertWeights::fill(int64_t expert, std::span<uint16_t> w13, std::span<uint16_t> w2) const {
  require_size("w13", w13.size(), 2 * intermediate_ * hidden_);
  require_size("w2", w2.size(), hidden_ * intermediate_);
  for (int64_t row = 0; row < 2 * intermediate_; ++row) {
    fill_row(levels13_, row_key(seed_, kGateUp, expert, row), hidden_, w13.data() + row * hidden_);
  }
  for (int64_t row = 0; row < hidden_; ++row) {
    fill_row(levels2_, row_key(seed_, kDown, expert, row), intermediate_, w2.data() + row * intermediate_);
  }
}

ExpertMlp::Source ExpertWeights::source(int64_t first_expert) const {
  return [weights = *this, first_expert](int expert, std::span<uint16_t> w13, std::span<uint16_t> w2) {
    weights.fill(first_expert + expert, w13, w2);
  };
}

}  // namespace switchyard

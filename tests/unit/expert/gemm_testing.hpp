// SPDX-License-Identifier: Apache-2.0
// Code shared by the GEMM and expert tests: an independent bf16 implementation, independent data, and child processes with a
// different environment.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace switchyard::testing {

inline double value_of(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Returns the bf16 value nearest to a double (ties to even), found by a search among its neighbors; shares no method with the
/// library. Finite values only.
inline uint16_t nearest_bf16(double value) {
  const auto rounded_to_float = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &rounded_to_float, sizeof bits);
  const auto start = static_cast<uint16_t>(bits >> 16);  // truncated: the result is this value or a neighbor
  uint16_t best = start;
  for (const int step : {-1, 1}) {
    const auto candidate = static_cast<uint16_t>(start + step);
    const double now = std::abs(value_of(best) - value), then = std::abs(value_of(candidate) - value);
    if (std::isnan(then)) continue;
    if (then < now || (then == now && (candidate & 1) == 0)) best = candidate;
  }
  return best;
}

/// Integers in [-range, range] as bf16, range <= 256: their products and sums are exact in float32 up to 2^24.
inline std::vector<uint16_t> small_integers(size_t n, int range, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> pick(-range, range);
  std::vector<uint16_t> out(n);
  for (uint16_t& element : out) element = nearest_bf16(pick(random));
  return out;
}

/// Normally distributed values with the given deviation, as bf16.
inline std::vector<uint16_t> normal_bf16(size_t n, double deviation, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> pick(0.0, deviation);
  std::vector<uint16_t> out(n);
  for (uint16_t& element : out) element = nearest_bf16(pick(random));
  return out;
}

/// Runs `body` in a new process of this test with the variables set, and expects it to finish without a failed assertion. The
/// process is re-executed, so libraries read the environment again. `body` runs only in the child.
template <class Body>
void expect_success_with(const std::vector<std::pair<std::string, std::string>>& environment, Body&& body) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::vector<std::pair<std::string, std::string>> saved;
  std::vector<std::string> unset;
  for (const auto& [name, value] : environment) {
    if (const char* old = std::getenv(name.c_str())) {
      saved.emplace_back(name, old);
    } else {
      unset.push_back(name);
    }
    setenv(name.c_str(), value.c_str(), 1);
  }
  EXPECT_EXIT(
      {
        body();
        std::exit(::testing::Test::HasFailure() ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), "");
  for (const auto& [name, value] : saved) setenv(name.c_str(), value.c_str(), 1);
  for (const std::string& name : unset) unsetenv(name.c_str());
}

}  // namespace switchyard::testing

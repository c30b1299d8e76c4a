// SPDX-License-Identifier: Apache-2.0
// Random draws for the randomized suites.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "oracle/rows.hpp"

namespace harness {

inline uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 0) : otherwise;
}

/// Uniform draws from one seed.
class Draw {
 public:
  explicit Draw(uint64_t seed) : seed_(seed) {}
  uint64_t bits() { return oracle::mix(seed_, ++count_); }
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(uint64_t n) { return bits() % n == 0; }
  template <class T, size_t N>
  T one_of(const T (&values)[N]) {
    return values[bits() % N];
  }

 private:
  uint64_t seed_, count_ = 0;
};

}  // namespace harness

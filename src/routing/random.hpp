// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace switchyard::detail {

/// One step of SplitMix64: a bijection on 64-bit words whose outputs appear independent.
constexpr uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// Purpose of a random number sequence; sequences with different purposes are independent.
enum class Purpose : uint64_t { experts = 0, drops = 1, weights = 2, popularity = 3 };

/// The random numbers for one (seed, rank, token, purpose). The sequence is part of the documented format of generated routing
/// (docs/routing.md): changing it changes every generated routing.
class TokenRandom {
 public:
  TokenRandom(uint64_t seed, int rank, int64_t token, Purpose purpose)
      : state_(mix64(mix64(mix64(mix64(seed) ^ static_cast<uint64_t>(rank)) ^ static_cast<uint64_t>(token)) ^
                     static_cast<uint64_t>(purpose))) {}

  uint64_t next() {
    const uint64_t value = mix64(state_);
    state_ += 0x9E3779B97F4A7C15u;
    return value;
  }

  /// Uniform in [0, n), without bias; 1 <= n <= 2^32.
  uint64_t below(uint64_t n) {
    const uint64_t reject_below = (uint64_t{1} << 32) % n;
    for (;;) {
      const uint64_t product = (next() >> 32) * n;
      if ((product & 0xFFFFFFFFu) >= reject_below) return product >> 32;
    }
  }

  /// Uniform in [0, 1): a multiple of 2^-53.
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

}  // namespace switchyard::detail

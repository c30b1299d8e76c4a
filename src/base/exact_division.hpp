// SPDX-License-Identifier: Apache-2.0
// Divisions without a division instruction, for GPUs; also compiled for the host, where they are tested.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/macros.hpp"

namespace switchyard::detail {

/// n / d for n up to a bound, by a multiplication with 2^32 / d rounded up: exact while n * d < 2^32. Beyond that it divides.
class Divisor {
 public:
  Divisor() = default;
  SWITCHYARD_FN Divisor(uint32_t d, uint64_t largest_n)
      : d_(d),
        inverse_(d == 1                                ? uint64_t{1} << 32
                 : largest_n < (uint64_t{1} << 32) / d ? (uint64_t{1} << 32) / d + 1
                                                       : 0) {}

  SWITCHYARD_FN uint32_t value() const { return d_; }
  /// True if quotient_fast is exact for all n up to the bound.
  SWITCHYARD_FN bool fast() const { return inverse_ != 0; }
  SWITCHYARD_FN uint32_t quotient_fast(uint32_t n) const { return static_cast<uint32_t>(n * inverse_ >> 32); }
  SWITCHYARD_FN uint32_t quotient(uint32_t n) const { return fast() ? quotient_fast(n) : n / d_; }

 private:
  uint32_t d_ = 1;
  uint64_t inverse_ = uint64_t{1} << 32;
};

inline constexpr float kSmallestFastScale = 0x1p-60f;

/// x / scale as IEEE rounds it, but for the sign of a zero: a quotient and two corrections by its exact remainder. `inverse` is
/// 1 / scale rounded correctly: with a guess of it, quotients next to a power of two come out wrong. For finite x and scale >=
/// kSmallestFastScale: no step underflows where a bit of the e4m3 result depends on it.
SWITCHYARD_FN inline float divide_by(float x, float scale, float inverse) {
#if defined(__CUDA_ARCH__)
  const float first = __fmul_rn(x, inverse);
  const float second = __fmaf_rn(__fmaf_rn(-first, scale, x), inverse, first);
  return __fmaf_rn(__fmaf_rn(-second, scale, x), inverse, second);
#else
  const float first = x * inverse;
  const float second = std::fma(std::fma(-first, scale, x), inverse, first);
  return std::fma(std::fma(-second, scale, x), inverse, second);
#endif
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Division by a number whose reciprocal is known. It is also compiled for the host, where it is tested.
#pragma once

#include <cmath>

#include "base/macros.hpp"

namespace switchyard::detail {

inline constexpr float kSmallestFastScale = 0x1p-60f;

/// x / scale with IEEE rounding, except for the sign of a zero: computes a quotient and corrects it twice by its exact
/// remainder. `inverse` must be the correctly rounded 1 / scale; with an approximation, quotients next to a power of two would
/// be wrong. Requires finite x and scale >= kSmallestFastScale: no step then underflows where it would affect a bit of the e4m3
/// result.
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

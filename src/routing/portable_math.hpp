// SPDX-License-Identifier: Apache-2.0
// exp and log built from basic IEEE 754 operations, so that routing has the same bits on every machine (the C library's
// functions differ between versions). The relative error is below 1e-15; not optimized for speed.
#pragma once

#include <cmath>
#include <limits>

namespace switchyard::detail {

/// e^x. Underflows to 0, overflows to infinity; NaN stays NaN.
inline double portable_exp(double x) {
  if (x != x) return x;
  if (x < -745.2) return 0;
  if (x > 709.8) return std::numeric_limits<double>::infinity();
  // x = n ln 2 + r, |r| <= ln 2 / 2; the high part of ln 2 has 21 trailing zero bits, so that n * high is exact.
  constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  const double n = std::floor(x * 1.4426950408889634 + 0.5);
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double sum = 1;  // Taylor series to r^14 / 14!, evaluated from its end
  for (int i = 14; i > 0; --i) sum = 1 + sum * r / i;
  return std::ldexp(sum, static_cast<int>(n));
}

/// Natural logarithm of a positive, finite, normal x.
inline double portable_log(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);  // [0.5, 1)
  if (m < 0.70710678118654752) {
    m *= 2;
    --exponent;
  }
  const double z = (m - 1) / (m + 1), z2 = z * z;  // |z| < 0.172; log m = 2 (z + z^3 / 3 + z^5 / 5 + ...)
  double sum = 0;
  for (int i = 23; i > 0; i -= 2) sum = sum * z2 + 1.0 / i;
  return 2 * z * sum + exponent * 0.69314718055994530942;
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Expected results of the arithmetic ops, derived from the definition of the formats: every code is decoded to an exact double,
// and rounding searches for the nearest code. Shares neither code nor techniques with src/.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "switchyard/types.hpp"

namespace switchyard::conformance {

/// A binary format of `1 + exponent_bits + mantissa_bits` bits.
class Format {
 public:
  /// `has_infinity`: the top exponent holds infinity and NaNs (IEEE). Otherwise, only the all-ones code is NaN, and rounding
  /// saturates.
  Format(int exponent_bits, int mantissa_bits, bool has_infinity)
      : mantissa_bits_(mantissa_bits), bias_((1 << (exponent_bits - 1)) - 1), has_infinity_(has_infinity) {
    const uint32_t codes = 1u << (exponent_bits + mantissa_bits);
    const uint32_t infinity = codes - (1u << mantissa_bits);
    const uint32_t finite = has_infinity ? infinity : codes - 1;
    sign_ = codes;
    infinity_code_ = infinity;
    nan_code_ = has_infinity ? infinity + (1u << (mantissa_bits - 1)) : codes - 1;
    for (uint32_t code = 0; code < finite; ++code) magnitudes_.push_back(magnitude_of(code));
  }

  double decode(uint32_t code) const {
    const double sign = (code & sign_) != 0 ? -1.0 : 1.0;
    const uint32_t magnitude = code & (sign_ - 1);
    if (magnitude < magnitudes_.size()) return sign * magnitudes_[magnitude];
    if (has_infinity_ && magnitude == infinity_code_) return sign * std::numeric_limits<double>::infinity();
    return std::numeric_limits<double>::quiet_NaN();
  }

  bool is_nan(uint32_t code) const { return std::isnan(decode(code)); }
  uint32_t nan_code() const { return nan_code_; }

  /// Returns the nearest code; ties go to the even code. The values of all codes are exact in double.
  uint32_t encode(double value) const {
    if (std::isnan(value)) return nan_code_;
    const uint32_t sign = std::signbit(value) ? sign_ : 0;
    const double magnitude = std::fabs(value);
    const auto above = std::upper_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
    const auto low = static_cast<uint32_t>(above - magnitudes_.begin()) - 1;
    if (above == magnitudes_.end()) {
      const double last = magnitudes_.back();
      const double half_step = (last - magnitudes_[magnitudes_.size() - 2]) / 2;
      // The largest finite IEEE code is odd, so the halfway case above it rounds to infinity.
      return sign | (has_infinity_ && magnitude >= last + half_step ? infinity_code_ : low);
    }
    const double below_distance = magnitude - magnitudes_[low];
    const double above_distance = *above - magnitude;
    if (below_distance != above_distance) return sign | (below_distance < above_distance ? low : low + 1);
    return sign | (low % 2 == 0 ? low : low + 1);
  }

 private:
  double magnitude_of(uint32_t code) const {
    const int exponent = static_cast<int>(code >> mantissa_bits_);
    const double fraction = std::ldexp(static_cast<double>(code & ((1u << mantissa_bits_) - 1)), -mantissa_bits_);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias_) : std::ldexp(1.0 + fraction, exponent - bias_);
  }

  int mantissa_bits_;
  int bias_;
  bool has_infinity_;
  uint32_t sign_ = 0;
  uint32_t infinity_code_ = 0;
  uint32_t nan_code_ = 0;
  std::vector<double> magnitudes_;
};

inline const Format& bf16_format() {
  static const Format format(8, 7, true);
  return format;
}
inline const Format& f16_format() {
  static const Format format(5, 10, true);
  return format;
}
inline const Format& e4m3_format() {
  static const Format format(4, 3, false);
  return format;
}

/// Load and store element `i` of a bf16, f16 or f32 row.
inline float reference_load(const void* row, DType type, int64_t i) {
  if (type == DType::f32) {
    float value;
    std::memcpy(&value, static_cast<const char*>(row) + i * 4, 4);
    return value;
  }
  uint16_t code;
  std::memcpy(&code, static_cast<const char*>(row) + i * 2, 2);
  return static_cast<float>((type == DType::bf16 ? bf16_format() : f16_format()).decode(code));
}
inline void reference_store(void* row, DType type, int64_t i, float value) {
  if (type == DType::f32) {
    std::memcpy(static_cast<char*>(row) + i * 4, &value, 4);
    return;
  }
  const auto code =
      static_cast<uint16_t>((type == DType::bf16 ? bf16_format() : f16_format()).encode(static_cast<double>(value)));
  std::memcpy(static_cast<char*>(row) + i * 2, &code, 2);
}

/// Computes one element of a reduction. `volatile` prevents the compiler from fusing the product into the sum.
inline float reference_sum(const float* terms, const float* weights, int n, const float* biases, int num_biases) {
  volatile float sum = 0.0f;
  if (num_biases > 0) sum = biases[0];
  if (num_biases > 1) sum = sum + biases[1];
  for (int i = 0; i < n; ++i) {
    volatile float term = terms[i];
    if (weights != nullptr) term = weights[i] * term;
    sum = sum + term;
  }
  return sum;
}

/// One group of a quantized row.
struct ReferenceGroup {
  float scale = 0;       ///< ScaleKind::f32
  uint8_t exponent = 0;  ///< ScaleKind::ue8m0
  std::vector<uint8_t> codes;
};
inline ReferenceGroup reference_quantize(const float* values, int64_t count, ScaleKind kind) {
  ReferenceGroup group;
  float amax = 0;
  bool infinite = false;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isfinite(values[i])) amax = std::max(amax, std::fabs(values[i]));
    infinite = infinite || std::isinf(values[i]);
  }
  volatile float scale = amax / 448.0f;
  if (scale == 0.0f && infinite) scale = 1.0f;  // otherwise the infinity would become zero
  const bool zero = scale == 0.0f;
  if (kind == ScaleKind::ue8m0) {
    int exponent = -127;
    while (std::ldexp(1.0, exponent) < static_cast<double>(scale)) ++exponent;
    group.exponent = static_cast<uint8_t>(exponent + 127);
    scale = static_cast<float>(std::ldexp(1.0, exponent));
  }
  group.scale = scale;
  for (int64_t i = 0; i < count; ++i) {
    volatile float ratio = zero ? 0.0f : values[i] / scale;
    if (std::isnan(values[i])) {
      group.codes.push_back(0x7F);
    } else {
      group.codes.push_back(static_cast<uint8_t>(e4m3_format().encode(static_cast<double>(ratio))));
    }
  }
  return group;
}

}  // namespace switchyard::conformance

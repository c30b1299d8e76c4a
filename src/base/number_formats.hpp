// SPDX-License-Identifier: Apache-2.0
// Scalar conversions between float32 and the row types. They use only integer arithmetic: no result depends on the rounding
// mode, flush-to-zero, contraction or the compiler. Every narrowing rounds to nearest even; a NaN yields some NaN. The vector
// code in arch/ produces the same results element by element.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/macros.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

inline constexpr uint32_t kF32Infinity = 0x7F800000u;  ///< bits of +inf; larger magnitudes are NaNs
inline constexpr float kE4m3Max = 448.0f;
inline constexpr uint8_t kE4m3Nan = 0x7F;

SWITCHYARD_FN constexpr uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
SWITCHYARD_FN constexpr float f32_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

/// The quotient `significand / 2^shift`, rounded to nearest even, for 1 <= shift <= 31 and significand < 2^30.
SWITCHYARD_FN constexpr uint32_t shift_right_nearest_even(uint32_t significand, uint32_t shift) {
  const uint32_t odd = (significand >> shift) & 1u;
  return (significand + (1u << (shift - 1)) - 1u + odd) >> shift;
}

SWITCHYARD_FN constexpr uint16_t bf16_from_f32(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7FFFFFFFu) > kF32Infinity) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
SWITCHYARD_FN constexpr float f32_from_bf16(uint16_t bits) { return f32_of_bits(static_cast<uint32_t>(bits) << 16); }

/// Overflow yields infinity; subnormal results are exact multiples of 2^-24.
SWITCHYARD_FN constexpr uint16_t f16_from_f32(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > kF32Infinity) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and above
  if (magnitude >= 0x38800000u) {                                              // 2^-14 and above: normal
    return static_cast<uint16_t>(sign | (shift_right_nearest_even(magnitude - 0x38000000u, 13)));
  }
  const uint32_t exponent = magnitude >> 23;
  if (exponent < 102) return static_cast<uint16_t>(sign);  // below 2^-25
  return static_cast<uint16_t>(sign | shift_right_nearest_even((magnitude & 0x7FFFFFu) | 0x800000u, 126 - exponent));
}
SWITCHYARD_FN constexpr float f32_from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return f32_of_bits(sign | kF32Infinity | ((magnitude & 0x3FFu) << 13));
  if (magnitude >= 0x0400u) return f32_of_bits(sign | ((magnitude << 13) + 0x38000000u));
  if (magnitude == 0) return f32_of_bits(sign);
  uint32_t top = 9;  // position of the highest set bit
  while (((magnitude >> top) & 1u) == 0) --top;
  return f32_of_bits(sign | ((top + 103u) << 23) | ((magnitude << (23 - top)) & 0x7FFFFFu));
}

/// FP8 e4m3 (no infinities, 0x7F and 0xFF are NaN). Saturates: magnitudes above 448, including infinity, become 448. NaN
/// becomes 0x7F.
SWITCHYARD_FN constexpr uint8_t e4m3_from_f32(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > kF32Infinity) return kE4m3Nan;
  if (magnitude >= 0x43E00000u) return static_cast<uint8_t>(sign | 0x7Eu);  // 448 and above
  if (magnitude >= 0x3C800000u) {                                           // 2^-6 and above: normal
    return static_cast<uint8_t>(sign | shift_right_nearest_even(magnitude - 0x3C000000u, 20));
  }
  const uint32_t exponent = magnitude >> 23;
  if (exponent < 117) return static_cast<uint8_t>(sign);  // below 2^-10
  return static_cast<uint8_t>(sign | shift_right_nearest_even((magnitude & 0x7FFFFFu) | 0x800000u, 141 - exponent));
}
SWITCHYARD_FN constexpr float f32_from_e4m3(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
  const uint32_t magnitude = bits & 0x7Fu;
  if (magnitude == 0x7Fu) return f32_of_bits(sign | 0x7FC00000u);
  if (magnitude >= 0x08u) return f32_of_bits(sign | ((magnitude << 20) + 0x3C000000u));
  if (magnitude == 0) return f32_of_bits(sign);
  uint32_t top = 2;
  while (((magnitude >> top) & 1u) == 0) --top;
  return f32_of_bits(sign | ((top + 118u) << 23) | ((magnitude << (23 - top)) & 0x7FFFFFu));
}

/// The smallest UE8M0 value (a power of two, at least 2^-127) that is not below `scale`, a finite float32 >= 0.
SWITCHYARD_FN constexpr uint8_t ue8m0_from_scale(float scale) {
  const uint32_t bits = bits_of(scale);
  if (bits <= 0x00400000u) return 0;  // 2^-127 and below
  return static_cast<uint8_t>((bits >> 23) + ((bits & 0x7FFFFFu) != 0 ? 1u : 0u));
}
SWITCHYARD_FN constexpr float f32_from_ue8m0(uint8_t bits) {
  if (bits == 0) return f32_of_bits(0x00400000u);
  if (bits == 0xFF) return f32_of_bits(0x7FC00000u);
  return f32_of_bits(static_cast<uint32_t>(bits) << 23);
}

/// Element `i` of a row of `type`, widened exactly (for fp8, without its scale). Any alignment.
inline float load_element(const void* row, DType type, int64_t i) {
  const auto* at = static_cast<const std::byte*>(row) + dtype_bytes(type, i);
  const auto bits = [&]<class Bits>(Bits value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  switch (type) {
    case DType::bf16: return f32_from_bf16(bits(uint16_t{}));
    case DType::f16: return f32_from_f16(bits(uint16_t{}));
    case DType::f32: return bits(float{});
    case DType::fp8_e4m3: return f32_from_e4m3(bits(uint8_t{}));
  }
  return 0.0f;
}

/// Rounds `value` to `type` and stores it as element `i`. Any alignment.
inline void store_element(void* row, DType type, int64_t i, float value) {
  auto* at = static_cast<std::byte*>(row) + dtype_bytes(type, i);
  const auto put = [&](auto bits) { std::memcpy(at, &bits, sizeof bits); };
  switch (type) {
    case DType::bf16: return put(bf16_from_f32(value));
    case DType::f16: return put(f16_from_f32(value));
    case DType::f32: return put(value);
    case DType::fp8_e4m3: return put(e4m3_from_f32(value));
  }
}

/// Calls f with `type` as a constant, so that the loops in f are compiled for it.
template <class F>
SWITCHYARD_FN void with_type(DType type, F&& f) {
  // clang-format off
  switch (type) {
#define SY_ROW_TYPE(name, ...) case DType::name: return f(std::integral_constant<DType, DType::name>{});
#include "switchyard/dtypes.def"
  }
  // clang-format on
}

/// Calls f<type>() if combine accepts the type; otherwise does nothing.
template <class F>
SWITCHYARD_FN void with_combined_type(DType type, F&& f) {
  with_type(type, [&](auto t) {
    if constexpr (dtype_combines(t())) f.template operator()<t()>();
  });
}
/// Calls f<type>() if the type can be quantized; otherwise does nothing.
template <class F>
SWITCHYARD_FN void with_quantised_type(DType type, F&& f) {
  with_type(type, [&](auto t) {
    if constexpr (dtype_quantises(t())) f.template operator()<t()>();
  });
}

/// Loads n elements of a row, starting at element `from`; see load_element.
inline void load_elements(const void* row, DType type, int64_t from, int64_t n, float* to) {
  with_type(type, [&](auto t) {
    for (int64_t i = 0; i < n; ++i) to[i] = load_element(row, t(), from + i);
  });
}
/// Stores x[0 .. n) as elements of a row, starting at element `to`; see store_element.
inline void store_elements(void* row, DType type, int64_t to, int64_t n, const float* x) {
  with_type(type, [&](auto t) {
    for (int64_t i = 0; i < n; ++i) store_element(row, t(), to + i, x[i]);
  });
}

}  // namespace switchyard::detail

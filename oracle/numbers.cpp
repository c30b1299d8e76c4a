// SPDX-License-Identifier: Apache-2.0
#include "oracle/numbers.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace oracle {

using switchyard::DType;

namespace {

/// floor(log2(value)) of a positive double that is not subnormal (no float is subnormal as a double).
int exponent_of(double value) { return static_cast<int>(__builtin_bit_cast(uint64_t, value) >> 52) - 1023; }

constexpr int bias_of(int exponent_bits) { return (1 << (exponent_bits - 1)) - 1; }

/// Nearest integer (ties go to even) for 0 <= value < 2^51. The intermediate sum is so large that it has no fraction bits.
double nearest(double value) { return (value + 0x1.0p52) - 0x1.0p52; }

/// Inlined so that the formats are constants in loops over rows. These process hundreds of millions of elements, and under a
/// sanitizer, every call and every read of a Format costs several times as much as the arithmetic.
[[gnu::always_inline]] inline uint32_t encoded(const Format format, double value) {
  const int bias = bias_of(format.exponent_bits);
  const uint32_t sign = std::signbit(value) ? 1u << (format.exponent_bits + format.mantissa_bits) : 0u;
  const uint32_t all_ones = (1u << format.exponent_bits) - 1;  // value of the exponent field
  const uint32_t mantissa_mask = (1u << format.mantissa_bits) - 1;
  if (std::isnan(value)) {
    if (format.finite_only) return all_ones << format.mantissa_bits | mantissa_mask;
    return all_ones << format.mantissa_bits | (1u << (format.mantissa_bits - 1));
  }
  // e4m3 reserves only its last code, for NaN; the other formats reserve a whole exponent for infinities and NaNs.
  const uint32_t largest = format.finite_only ? (all_ones << format.mantissa_bits | mantissa_mask) - 1
                                              : ((all_ones - 1) << format.mantissa_bits | mantissa_mask);
  const uint32_t overflow = format.finite_only ? largest : all_ones << format.mantissa_bits;
  const int top_exponent = static_cast<int>(largest >> format.mantissa_bits) - bias;
  const double top =
      static_cast<double>(mantissa_mask + 1 + (largest & mantissa_mask)) * power_of_two(top_exponent - format.mantissa_bits);
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  if (magnitude >= 2 * top) return sign | overflow;

  // Rounds to a multiple of the quantum of the value's binade or, for subnormals, of the smallest normal binade.
  const int binade = exponent_of(magnitude), exponent = binade < 1 - bias ? 1 - bias : binade;
  const double steps = nearest(magnitude * power_of_two(format.mantissa_bits - exponent));
  if (steps * power_of_two(exponent - format.mantissa_bits) > top) return sign | overflow;
  // The step count of a normal number includes its leading one, which adds one to the exponent, as does a carry into the next
  // binade.
  return sign | ((static_cast<uint32_t>(exponent + bias - 1) << format.mantissa_bits) + static_cast<uint32_t>(steps));
}

[[gnu::always_inline]] inline double decoded(const Format format, uint32_t code) {
  const uint32_t all_ones = (1u << format.exponent_bits) - 1;
  const uint32_t mantissa_mask = (1u << format.mantissa_bits) - 1;
  const uint32_t exponent = code >> format.mantissa_bits & all_ones;
  const uint32_t mantissa = code & mantissa_mask;
  const double sign = code >> (format.exponent_bits + format.mantissa_bits) & 1 ? -1.0 : 1.0;
  if (exponent == all_ones && (!format.finite_only || mantissa == mantissa_mask)) {
    if (!format.finite_only && mantissa == 0) return sign * std::numeric_limits<double>::infinity();
    return std::numeric_limits<double>::quiet_NaN();
  }
  const int shift = 1 - bias_of(format.exponent_bits) - format.mantissa_bits;
  if (exponent == 0) return sign * static_cast<double>(mantissa) * power_of_two(shift);
  return sign * static_cast<double>(mantissa | (1u << format.mantissa_bits)) *
         power_of_two(shift + static_cast<int>(exponent) - 1);
}

// bf16 is the upper half of a float32, so decoding is a shift, and rounding is an addition whose carry may reach the exponent.
[[gnu::always_inline]] inline float bf16_value(uint16_t code) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(code) << 16);
}
[[gnu::always_inline]] inline uint16_t bf16_code(float value) {
  const auto word = __builtin_bit_cast(uint32_t, value);
  const uint32_t half = 0x7FFF + (word >> 16 & 1);  // ties go to the even code
  return (word & 0x7FFFFFFF) > 0x7F800000 ? uint16_t{0x7FC0} : static_cast<uint16_t>((word + half) >> 16);
}
[[gnu::always_inline]] inline float f16_value(uint16_t code) { return static_cast<float>(decoded(kF16, code)); }
[[gnu::always_inline]] inline uint16_t f16_code(float value) { return static_cast<uint16_t>(encoded(kF16, value)); }
[[gnu::always_inline]] inline float e4m3_value(uint8_t code) { return static_cast<float>(decoded(kE4m3, code)); }
[[gnu::always_inline]] inline uint8_t e4m3_code(float value) { return static_cast<uint8_t>(encoded(kE4m3, value)); }

// Rows are read and written as a whole, so race detectors see a single access.

template <class T, class Value>
[[gnu::always_inline]] inline void load_codes(const void* row, int64_t elements, float* values, const Value& value_of) {
  std::vector<T> codes(static_cast<size_t>(elements));
  std::memcpy(codes.data(), row, codes.size() * sizeof(T));
  const T* const code = codes.data();
  for (int64_t i = 0; i < elements; ++i) values[i] = value_of(code[i]);
}

template <class T, class Code>
[[gnu::always_inline]] inline void store_codes(const float* values, int64_t elements, void* row, const Code& code_of) {
  std::vector<T> codes(static_cast<size_t>(elements));
  T* const code = codes.data();
  for (int64_t i = 0; i < elements; ++i) code[i] = code_of(values[i]);
  std::memcpy(row, code, codes.size() * sizeof(T));
}

template <class T>
T element(const void* row, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(row) + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <class T>
void put(void* row, int64_t i, T value) {
  std::memcpy(static_cast<std::byte*>(row) + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

}  // namespace

uint32_t encode(const Format& format, double value) { return encoded(format, value); }
double decode(const Format& format, uint32_t code) { return decoded(format, code); }

void load_row(DType type, const void* row, int64_t elements, float* values) {
  switch (type) {
    case DType::bf16: return load_codes<uint16_t>(row, elements, values, [](auto code) { return bf16_value(code); });
    case DType::f16: return load_codes<uint16_t>(row, elements, values, [](auto code) { return f16_value(code); });
    case DType::f32: std::memcpy(values, row, static_cast<size_t>(elements) * sizeof(float)); return;
    case DType::fp8_e4m3: return load_codes<uint8_t>(row, elements, values, [](auto code) { return e4m3_value(code); });
  }
}

void store_row(DType type, const float* values, int64_t elements, void* row) {
  switch (type) {
    case DType::bf16: return store_codes<uint16_t>(values, elements, row, [](float value) { return bf16_code(value); });
    case DType::f16: return store_codes<uint16_t>(values, elements, row, [](float value) { return f16_code(value); });
    case DType::f32: std::memcpy(row, values, static_cast<size_t>(elements) * sizeof(float)); return;
    case DType::fp8_e4m3: return store_codes<uint8_t>(values, elements, row, [](float value) { return e4m3_code(value); });
  }
}

float load(DType type, const void* row, int64_t i) {
  switch (type) {
    case DType::bf16: return bf16_value(element<uint16_t>(row, i));
    case DType::f16: return f16_value(element<uint16_t>(row, i));
    case DType::f32: return element<float>(row, i);
    case DType::fp8_e4m3: return e4m3_value(element<uint8_t>(row, i));
  }
  return 0;
}

void store(DType type, void* row, int64_t i, float value) {
  switch (type) {
    case DType::bf16: return put(row, i, bf16_code(value));
    case DType::f16: return put(row, i, f16_code(value));
    case DType::f32: return put(row, i, value);
    case DType::fp8_e4m3: return put(row, i, e4m3_code(value));
  }
}

float rounded(DType type, float value) {
  switch (type) {
    case DType::bf16: return bf16_value(bf16_code(value));
    case DType::f16: return f16_value(f16_code(value));
    case DType::f32: return value;
    case DType::fp8_e4m3: return e4m3_value(e4m3_code(value));
  }
  return 0;
}

bool same_element(DType type, const void* a, const void* b, int64_t i) {
  const auto* x = static_cast<const std::byte*>(a) + switchyard::dtype_bytes(type, i);
  const auto* y = static_cast<const std::byte*>(b) + switchyard::dtype_bytes(type, i);
  if (std::memcmp(x, y, switchyard::dtype_bytes(type, 1)) == 0) return true;
  return std::isnan(load(type, a, i)) && std::isnan(load(type, b, i));
}

int64_t first_difference(DType type, const void* a, const void* b, int64_t elements) {
  if (elements == 0 || std::memcmp(a, b, switchyard::dtype_bytes(type, elements)) == 0) return elements;
  int64_t i = 0;
  while (i < elements && same_element(type, a, b, i)) ++i;
  return i;
}

}  // namespace oracle

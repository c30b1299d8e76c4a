// SPDX-License-Identifier: Apache-2.0
#include "oracle/numbers.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace oracle {

using switchyard::DType;

namespace {

/// 2^e, -1022 <= e <= 1023.
double power_of_two(int e) {
  const uint64_t bits = static_cast<uint64_t>(e + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// floor(log2(value)) of a positive double that is not subnormal (no float is, as a double).
int exponent_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<int>(bits >> 52) - 1023;
}

/// Nearest integer, ties to even, for 0 <= value < 2^51: the sum has no room for a fraction.
double nearest(double value) { return (value + 0x1.0p52) - 0x1.0p52; }

}  // namespace

uint32_t encode(const Format& format, double value) {
  const int bias = format.bias();
  const uint32_t sign = std::signbit(value) ? 1u << (format.exponent_bits + format.mantissa_bits) : 0u;
  const uint32_t all_ones = (1u << format.exponent_bits) - 1;  // exponent field
  const uint32_t mantissa_mask = (1u << format.mantissa_bits) - 1;
  if (std::isnan(value)) {
    if (format.finite_only) return all_ones << format.mantissa_bits | mantissa_mask;
    return all_ones << format.mantissa_bits | (1u << (format.mantissa_bits - 1));
  }
  // e4m3 loses only its last code to NaN, the others lose a whole exponent to infinity and NaN.
  const uint32_t largest = format.finite_only ? (all_ones << format.mantissa_bits | mantissa_mask) - 1
                                              : ((all_ones - 1) << format.mantissa_bits | mantissa_mask);
  const uint32_t overflow = format.finite_only ? largest : all_ones << format.mantissa_bits;
  const int top_exponent = static_cast<int>(largest >> format.mantissa_bits) - bias;
  const double top =
      static_cast<double>(mantissa_mask + 1 + (largest & mantissa_mask)) * power_of_two(top_exponent - format.mantissa_bits);
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  if (magnitude >= 2 * top) return sign | overflow;

  // Round to a multiple of the quantum of the value's binade (of the subnormals below the smallest normal one).
  const int exponent = std::max(exponent_of(magnitude), 1 - bias);
  const double steps = nearest(magnitude * power_of_two(format.mantissa_bits - exponent));
  if (steps * power_of_two(exponent - format.mantissa_bits) > top) return sign | overflow;
  // A normal number has its leading one among the steps; it counts one exponent. A carry into the next binade does the same.
  return sign | ((static_cast<uint32_t>(exponent + bias - 1) << format.mantissa_bits) + static_cast<uint32_t>(steps));
}

double decode(const Format& format, uint32_t code) {
  const uint32_t all_ones = (1u << format.exponent_bits) - 1;
  const uint32_t mantissa_mask = (1u << format.mantissa_bits) - 1;
  const uint32_t exponent = code >> format.mantissa_bits & all_ones;
  const uint32_t mantissa = code & mantissa_mask;
  const double sign = code >> (format.exponent_bits + format.mantissa_bits) & 1 ? -1.0 : 1.0;
  if (exponent == all_ones && (!format.finite_only || mantissa == mantissa_mask)) {
    if (!format.finite_only && mantissa == 0) return sign * std::numeric_limits<double>::infinity();
    return std::numeric_limits<double>::quiet_NaN();
  }
  const int shift = 1 - format.bias() - format.mantissa_bits;
  if (exponent == 0) return sign * static_cast<double>(mantissa) * power_of_two(shift);
  return sign * static_cast<double>(mantissa | (1u << format.mantissa_bits)) *
         power_of_two(shift + static_cast<int>(exponent) - 1);
}

namespace {

/// All values of a 16-bit format, by code: decoding a row is a look-up.
const float* table_of(const Format& format) {
  auto build = [](const Format& f) {
    std::vector<float> values(1u << 16);
    for (uint32_t code = 0; code < values.size(); ++code) values[code] = static_cast<float>(decode(f, code));
    return values;
  };
  static const std::vector<float> bf16 = build(kBf16);
  static const std::vector<float> f16 = build(kF16);
  return format.mantissa_bits == kBf16.mantissa_bits ? bf16.data() : f16.data();
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

float load(DType type, const void* row, int64_t i) {
  switch (type) {
    case DType::bf16: return table_of(kBf16)[element<uint16_t>(row, i)];
    case DType::f16: return table_of(kF16)[element<uint16_t>(row, i)];
    case DType::f32: return element<float>(row, i);
    case DType::fp8_e4m3: return static_cast<float>(decode(kE4m3, element<uint8_t>(row, i)));
  }
  return 0;
}

void store(DType type, void* row, int64_t i, float value) {
  switch (type) {
    case DType::bf16: return put(row, i, static_cast<uint16_t>(encode(kBf16, value)));
    case DType::f16: return put(row, i, static_cast<uint16_t>(encode(kF16, value)));
    case DType::f32: return put(row, i, value);
    case DType::fp8_e4m3: return put(row, i, static_cast<uint8_t>(encode(kE4m3, value)));
  }
}

bool same_element(DType type, const void* a, const void* b, int64_t i) {
  const auto width = static_cast<int64_t>(switchyard::dtype_bytes(type));
  const auto* x = static_cast<const std::byte*>(a) + i * width;
  const auto* y = static_cast<const std::byte*>(b) + i * width;
  if (std::memcmp(x, y, static_cast<size_t>(width)) == 0) return true;
  return std::isnan(load(type, a, i)) && std::isnan(load(type, b, i));
}

}  // namespace oracle

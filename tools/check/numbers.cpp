// SPDX-License-Identifier: Apache-2.0
#include "check/numbers.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

namespace switchyard::tool {
namespace {

/// An IEEE-like format: `significand` bits with the hidden one, smallest normal exponent, largest finite value.
struct Format {
  int significand;
  int min_exponent;
  double largest;
  bool saturates;
};
constexpr Format kF16{11, -14, 65504, false};
constexpr Format kE4m3{4, -6, 448, true};

/// The nearest value of the format; exact arithmetic, since scaling by powers of two is exact in double.
double nearest(const Format& f, double value) {
  if (std::isnan(value) || value == 0) return value;
  if (std::isinf(value)) return f.saturates ? std::copysign(f.largest, value) : value;
  const int exponent = std::max(std::ilogb(value), f.min_exponent);
  const double quantum = std::ldexp(1.0, exponent - f.significand + 1);
  const double result = std::nearbyint(value / quantum) * quantum;  // ties to even: the default rounding mode
  if (std::abs(result) <= f.largest) return result;
  return std::copysign(f.saturates ? f.largest : std::numeric_limits<double>::infinity(), value);
}

/// Code of a value that the format has, in `bits` bits with `significand - 1` mantissa bits.
uint32_t encode(const Format& f, int bits, double value) {
  const uint32_t sign = std::signbit(value) ? 1u << (bits - 1) : 0u;
  const int mantissa_bits = f.significand - 1;
  const double magnitude = std::abs(value);
  if (magnitude == 0) return sign;
  const int exponent = std::ilogb(magnitude);
  if (exponent < f.min_exponent) {
    return sign | static_cast<uint32_t>(std::ldexp(magnitude, mantissa_bits - f.min_exponent));
  }
  const auto mantissa = static_cast<uint32_t>(std::ldexp(magnitude, mantissa_bits - exponent)) - (1u << mantissa_bits);
  return sign | (static_cast<uint32_t>(exponent - f.min_exponent + 1) << mantissa_bits) | mantissa;
}

double decode(const Format& f, int bits, uint32_t code) {
  const int mantissa_bits = f.significand - 1;
  const double sign = (code >> (bits - 1)) != 0 ? -1 : 1;
  const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
  const auto exponent = static_cast<int>((code & ((1u << (bits - 1)) - 1)) >> mantissa_bits);
  const int all_ones = (1 << (bits - 1 - mantissa_bits)) - 1;
  if (f.saturates) {
    if ((code & 0x7F) == 0x7F) return std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == all_ones) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<double>(mantissa), f.min_exponent - mantissa_bits);
  return sign *
         std::ldexp(static_cast<double>(mantissa + (1u << mantissa_bits)), exponent - 1 + f.min_exponent - mantissa_bits);
}

template <int kBits>
std::array<float, size_t{1} << kBits> decode_table(const Format& f) {
  std::array<float, size_t{1} << kBits> table{};
  for (uint32_t code = 0; code < table.size(); ++code) table[code] = static_cast<float>(decode(f, kBits, code));
  return table;
}

/// bf16 is the upper half of a float32: rounding is an integer addition that carries into the exponent.
uint16_t bf16_bits(float value) {
  if (std::isnan(value)) return 0x7FFF;
  uint32_t word = 0;
  std::memcpy(&word, &value, sizeof word);
  const uint32_t lower = word & 0xFFFFu;
  const uint32_t upper = word >> 16;
  return static_cast<uint16_t>(upper + (lower > 0x8000u || (lower == 0x8000u && (upper & 1u) != 0) ? 1u : 0u));
}

uint16_t f16_bits(float value) {
  if (std::isnan(value)) return 0x7FFF;
  const double result = nearest(kF16, static_cast<double>(value));
  if (std::isinf(result)) return static_cast<uint16_t>((std::signbit(result) ? 0x8000u : 0u) | 0x7C00u);
  return static_cast<uint16_t>(encode(kF16, 16, result));
}

}  // namespace

float element(const void* row, DType type, int64_t i) {
  static const auto f16 = decode_table<16>(kF16);
  static const auto e4m3 = decode_table<8>(kE4m3);
  const auto* bytes = static_cast<const unsigned char*>(row) + static_cast<size_t>(i) * dtype_bytes(type);
  uint16_t half = 0;
  switch (type) {
    case DType::f32: {
      float value = 0;
      std::memcpy(&value, bytes, sizeof value);
      return value;
    }
    case DType::bf16: {  // the upper half of a float32
      std::memcpy(&half, bytes, sizeof half);
      const uint32_t word = static_cast<uint32_t>(half) << 16;
      float value = 0;
      std::memcpy(&value, &word, sizeof value);
      return value;
    }
    case DType::f16: std::memcpy(&half, bytes, sizeof half); return f16[half];
    case DType::fp8_e4m3: return e4m3[*bytes];
  }
  return 0;
}

void store_element(void* row, DType type, int64_t i, float value) {
  auto* bytes = static_cast<unsigned char*>(row) + static_cast<size_t>(i) * dtype_bytes(type);
  switch (type) {
    case DType::f32: std::memcpy(bytes, &value, sizeof value); return;
    case DType::bf16:
    case DType::f16: {
      const uint16_t bits = type == DType::bf16 ? bf16_bits(value) : f16_bits(value);
      std::memcpy(bytes, &bits, sizeof bits);
      return;
    }
    case DType::fp8_e4m3:
      *bytes =
          std::isnan(value) ? 0x7F : static_cast<unsigned char>(encode(kE4m3, 8, nearest(kE4m3, static_cast<double>(value))));
      return;
  }
}

float rounded(float value, DType type) {
  switch (type) {
    case DType::f32: return value;
    case DType::bf16: {
      const uint16_t bits = bf16_bits(value);
      return element(&bits, DType::bf16, 0);
    }
    case DType::f16: return static_cast<float>(nearest(kF16, static_cast<double>(value)));
    case DType::fp8_e4m3: return static_cast<float>(nearest(kE4m3, static_cast<double>(value)));
  }
  return 0;
}

void quantize_reference(const void* row, DType type, int64_t hidden, ScaleKind kind, uint8_t* q, void* scales, int size) {
  for (int64_t group = 0; group < num_scales(hidden, size); ++group) {
    const int64_t first = group * size;
    const int64_t last = std::min(hidden, first + size);
    float amax = 0;
    bool infinite = false;
    for (int64_t c = first; c < last; ++c) {
      const float value = std::abs(element(row, type, c));
      if (std::isfinite(value)) amax = std::max(amax, value);
      if (std::isinf(value)) infinite = true;
    }
    float scale = amax / 448.0f;
    if (scale == 0 && infinite) scale = 1;
    const bool zero = scale == 0;
    if (kind == ScaleKind::ue8m0) {
      int exponent = -127;
      while (std::ldexp(1.0, exponent) < static_cast<double>(scale)) ++exponent;
      static_cast<uint8_t*>(scales)[group] = static_cast<uint8_t>(exponent + 127);
      scale = static_cast<float>(std::ldexp(1.0, exponent));
    } else {
      std::memcpy(static_cast<char*>(scales) + 4 * group, &scale, sizeof scale);
    }
    for (int64_t c = first; c < last; ++c) {
      const float value = element(row, type, c);
      if (zero) {
        q[c] = std::isnan(value) ? 0x7F : 0;
        continue;
      }
      store_element(q, DType::fp8_e4m3, c, value / scale);
    }
  }
}

}  // namespace switchyard::tool

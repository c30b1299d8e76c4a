// SPDX-License-Identifier: Apache-2.0
// Compares base/number_formats.hpp with the definition of the formats (conformance/reference.hpp).
#include "base/number_formats.hpp"

#include "arch/cuda/divide_by.hpp"
#include "base/exact_division.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "conformance/reference.hpp"

namespace switchyard::conformance {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

static_assert(detail::bf16_from_f32(1.0f) == 0x3F80 && detail::f32_from_bf16(0xC000) == -2.0f);
static_assert(detail::f16_from_f32(65504.0f) == 0x7BFF && detail::f32_from_f16(0x0001) == 0x1p-24f);
static_assert(detail::e4m3_from_f32(1e9f) == 0x7E && detail::f32_from_e4m3(0x01) == 0x1p-9f);
static_assert(detail::ue8m0_from_scale(1.0f) == 127 && detail::f32_from_ue8m0(0) == 0x1p-127f);

/// Critical values for narrowing: all codes, all midpoints with both neighbors, and random bits.
std::vector<float> probes(const Format& format, uint32_t num_codes) {
  std::vector<float> values = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min(),
                               std::numeric_limits<float>::quiet_NaN()};
  for (uint32_t code = 0; code + 1 < num_codes; ++code) {
    const double low = format.decode(code);
    const double high = format.decode(code + 1);
    if (std::isnan(low) || !std::isfinite(high)) continue;
    const auto middle = static_cast<float>((low + high) / 2);
    for (const float value : {static_cast<float>(low), middle, std::nextafter(middle, static_cast<float>(high)),
                              std::nextafter(middle, static_cast<float>(low))}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  std::mt19937 random(5);
  for (int i = 0; i < 200000; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    float value;
    std::memcpy(&value, &bits, 4);
    values.push_back(value);
  }
  for (const uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0xFF800001u, 0x7F80FFFFu}) {
    float value;
    std::memcpy(&value, &bits, 4);
    values.push_back(value);
  }
  return values;
}

template <class Narrow>
void check_narrowing(const Format& format, uint32_t num_codes, Narrow narrow) {
  for (const float value : probes(format, num_codes)) {
    const uint32_t got = narrow(value);
    if (std::isnan(value)) {
      ASSERT_TRUE(format.is_nan(got)) << got;
    } else {
      ASSERT_EQ(got, format.encode(static_cast<double>(value))) << value;
    }
  }
}

template <class Widen>
void check_widening(const Format& format, uint32_t num_codes, Widen widen) {
  for (uint32_t code = 0; code < num_codes; ++code) {
    const float got = widen(code);
    const double want = format.decode(code);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got)) << code;
    } else {
      ASSERT_EQ(static_cast<double>(got), want) << code;
      ASSERT_EQ(std::signbit(got), std::signbit(want)) << code;
    }
  }
}

TEST(NumberFormats, Bf16) {
  check_widening(bf16_format(), 65536, [](uint32_t code) { return detail::f32_from_bf16(static_cast<uint16_t>(code)); });
  check_narrowing(bf16_format(), 32768, [](float value) { return detail::bf16_from_f32(value); });
}

TEST(NumberFormats, F16) {
  check_widening(f16_format(), 65536, [](uint32_t code) { return detail::f32_from_f16(static_cast<uint16_t>(code)); });
  check_narrowing(f16_format(), 32768, [](float value) { return detail::f16_from_f32(value); });
}

TEST(NumberFormats, E4m3) {
  check_widening(e4m3_format(), 256, [](uint32_t code) { return detail::f32_from_e4m3(static_cast<uint8_t>(code)); });
  check_narrowing(e4m3_format(), 128, [](float value) { return detail::e4m3_from_f32(value); });
  EXPECT_EQ(detail::e4m3_from_f32(-std::numeric_limits<float>::quiet_NaN()), 0x7F) << "one NaN, whatever its sign";
}

TEST(NumberFormats, Ue8m0) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(static_cast<double>(detail::f32_from_ue8m0(static_cast<uint8_t>(code))), std::ldexp(1.0, code - 127)) << code;
  }
  EXPECT_TRUE(std::isnan(detail::f32_from_ue8m0(255)));
  for (int exponent = -126; exponent <= 127; ++exponent) {
    const auto power = static_cast<float>(std::ldexp(1.0, exponent));
    EXPECT_EQ(detail::ue8m0_from_scale(power), exponent + 127);
    EXPECT_EQ(detail::ue8m0_from_scale(std::nextafter(power, 0.0f)), exponent + 127) << "rounds up to a power of two";
    if (exponent == 127) break;
    EXPECT_EQ(detail::ue8m0_from_scale(std::nextafter(power, 1e38f)), exponent + 128);
  }
  for (const float tiny : {0.0f, std::numeric_limits<float>::denorm_min(), 0x1p-127f})
    EXPECT_EQ(detail::ue8m0_from_scale(tiny), 0);
  EXPECT_EQ(detail::ue8m0_from_scale(std::nextafter(0x1p-127f, 1.0f)), 1);
}

TEST(NumberFormats, ElementsOfUnalignedRows) {
  alignas(8) std::byte row[64];
  for (const DType type : {DType::bf16, DType::f16, DType::f32, DType::fp8_e4m3}) {
    for (int64_t i = 0; i < 8; ++i) detail::store_element(row + 1, type, i, static_cast<float>(i) - 3.5f);
    for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(detail::load_element(row + 1, type, i), static_cast<float>(i) - 3.5f);
  }
}

/// Tests every significand at exponents from the smallest to the largest for which quantization uses this division.
TEST(ExactDivision, ScaleOfEveryMaximum) {
  constexpr float kInverse = 1.0f / detail::kE4m3Max;
  for (const int exponent : {-51, -50, -3, 0, 9, 126, 127}) {
    const uint32_t first = static_cast<uint32_t>(exponent + 127) << 23;
    for (uint32_t fraction = 0; fraction < 1u << 23; fraction += kSanitized ? 61 : 1) {
      const float amax = detail::f32_of_bits(first | fraction);
      if (amax < detail::kE4m3Max * detail::kSmallestFastScale) continue;
      const volatile float want = amax / detail::kE4m3Max;
      ASSERT_EQ(detail::bits_of(detail::divide_by(amax, detail::kE4m3Max, kInverse)), detail::bits_of(want)) << amax;
    }
  }
}

/// A default-constructed divisor divides by 1 and is fast(): kernels are warmed up with default layouts, and fast() selects the
/// kernel.
TEST(ExactDivision, DivisorBeginsAsOne) {
  const detail::Divisor one;
  EXPECT_TRUE(one.fast());
  for (const uint32_t n : {0u, 1u, 7u, 0xffffffffu}) {
    EXPECT_EQ(one.quotient(n), n);
    EXPECT_EQ(one.quotient_fast(n), n);
  }
}

/// Tests row and piece divisors near changes of the quotient, with bounds up to and beyond those that permit fast division.
TEST(ExactDivision, DivisorDividesUpToItsBound) {
  for (uint32_t d = 1; d < 3000; d += d < 300 ? 1 : 7) {
    for (const uint64_t bound :
         {uint64_t{0}, uint64_t{1000}, uint64_t{1} << 20, (uint64_t{1} << 32) / d - 1, (uint64_t{1} << 32) - 1}) {
      const detail::Divisor divisor(d, bound);
      ASSERT_EQ(divisor.value(), d);
      std::vector<uint64_t> tried{0, 1, bound / 2, bound};
      for (const uint64_t q : {uint64_t{1}, uint64_t{2}, bound / d / 2, bound / d})
        for (const uint64_t n : {q * d, q * d + 1, q * d + d - 1, q * d - 1}) tried.push_back(n);
      for (const uint64_t n : tried) {
        if (n > bound) continue;
        ASSERT_EQ(divisor.quotient(static_cast<uint32_t>(n)), n / d) << n << " / " << d << ", bound " << bound;
        if (divisor.fast()) {
          ASSERT_EQ(divisor.quotient_fast(static_cast<uint32_t>(n)), n / d) << n << " / " << d;
        }
      }
    }
  }
}

/// Tests the quotients of a group at the rounding points of e4m3 and next to them.
TEST(ExactDivision, QuotientsRoundAsDivided) {
  std::mt19937_64 random(17);
  for (int i = 0; i < (kSanitized ? 20000 : 400000); ++i) {
    const uint64_t bits = random();
    const auto exponent = static_cast<uint32_t>(bits % 187) + 67;  // of the scale: 2^-60 to 2^126
    const float scale = detail::f32_of_bits(exponent << 23 | static_cast<uint32_t>(bits >> 40 & 0x7FFFFF));
    if (scale < detail::kSmallestFastScale || scale > std::numeric_limits<float>::max() / detail::kE4m3Max) continue;
    const volatile float inverse = 1.0f / scale;
    const auto code = static_cast<uint8_t>(bits >> 8 & 0x7F);
    const float at = detail::f32_from_e4m3(code == 0x7F ? 0x7E : code),
                next = detail::f32_from_e4m3(code >= 0x7E ? 0x7E : code + 1);
    const float middle = (at + next) / 2 * scale;
    for (const float x : {at * scale, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e38f),
                          scale * static_cast<float>(bits >> 16 & 0xFFFF) * 0x1p-7f}) {
      if (!std::isfinite(x)) continue;
      const volatile float want = x / scale;
      ASSERT_EQ(int{detail::e4m3_from_f32(detail::divide_by(x, scale, inverse))}, int{detail::e4m3_from_f32(want)})
          << x << " / " << scale;
    }
  }
}

}  // namespace
}  // namespace switchyard::conformance

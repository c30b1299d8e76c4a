// SPDX-License-Identifier: Apache-2.0
// Tests conversions, SwiGLU and the weighted sum, element by element.
#include "gemm/cpu/row_math.hpp"

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "gemm_testing.hpp"

namespace switchyard::detail {
namespace {

using testing::nearest_bf16;
using testing::value_of;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint16_t swiglu_one(float gate, float up) {
  uint16_t result = 0;
  swiglu(&gate, &up, 1, &result);
  return result;
}

/// Expects the bf16 value nearest to silu(gate) * up, or the other candidate in a near-tie: float32 steps may have an error of
/// 2e-6 before the rounding.
void expect_swiglu(uint16_t result, double gate, double up) {
  const double exact = gate / (1.0 + std::exp(-gate)) * up;
  const double half_step = std::abs(value_of(nearest_bf16(exact)) - exact);
  ASSERT_LE(std::abs(value_of(result) - exact), half_step + std::abs(exact) * 2e-6 + 1e-44) << "gate " << gate << " up " << up;
}

TEST(RowMath, WidensEveryBf16Exactly) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(all.size());
  widen_bf16(all.data(), 65536, wide.data());
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(bits_of(wide[i]), static_cast<uint32_t>(i) << 16);
}

TEST(RowMath, RoundsToNearestEvenEverywhere) {
  // Values below, at and above the midpoint of every bf16 interval: normal, subnormal, and across the overflow to infinity.
  std::vector<float> in;
  for (uint32_t top = 0; top < 65536; ++top) {
    for (const uint32_t low : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) in.push_back(float_of(top << 16 | low));
  }
  std::vector<uint16_t> out(in.size());
  round_to_bf16(in.data(), static_cast<int64_t>(in.size()), out.data());
  const double past_the_last = 2.0 * value_of(0x7F7F) - value_of(0x7F7E);  // the position of the next bf16, if there were one
  for (size_t i = 0; i < in.size(); ++i) {
    if (std::isnan(in[i])) {
      ASSERT_TRUE(std::isnan(value_of(out[i]))) << std::hex << bits_of(in[i]);
    } else if (std::abs(in[i]) >= (past_the_last + value_of(0x7F7F)) / 2) {
      ASSERT_EQ(out[i], std::signbit(in[i]) ? 0xFF80 : 0x7F80) << std::hex << bits_of(in[i]);
    } else if (std::abs(in[i]) >= value_of(0x7F7F)) {
      ASSERT_EQ(out[i], std::signbit(in[i]) ? 0xFF7F : 0x7F7F) << std::hex << bits_of(in[i]);
    } else if (in[i] == 0 || std::abs(in[i]) <= value_of(1) / 2) {
      ASSERT_EQ(out[i], std::signbit(in[i]) ? 0x8000 : 0x0000) << std::hex << bits_of(in[i]);
    } else {
      ASSERT_EQ(out[i], nearest_bf16(in[i])) << std::hex << bits_of(in[i]);
    }
  }
}

TEST(RowMath, SwigluMatchesTheFormulaOverTheWholeRange) {
  std::vector<float> gate, up;
  for (const float magnitude :
       {0.0f, 1e-38f, 1e-20f, 1e-4f, 0.1f, 0.5f, 1.0f, 1.2785f, 3.0f, 10.0f, 17.0f, 30.0f, 60.0f, 87.0f}) {
    for (const float sign : {1.0f, -1.0f}) {
      for (const float u : {0.0f, 1.0f, -1.0f, 0.3f, 1000.0f, -1e-3f}) {
        gate.push_back(sign * magnitude);
        up.push_back(u);
      }
    }
  }
  std::vector<uint16_t> out(gate.size());
  swiglu(gate.data(), up.data(), static_cast<int64_t>(gate.size()), out.data());
  for (size_t i = 0; i < gate.size(); ++i) ASSERT_NO_FATAL_FAILURE(expect_swiglu(out[i], gate[i], up[i]));
}

TEST(RowMath, SwigluExtremes) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(swiglu_one(0.0f, 5.0f), 0x0000);
  EXPECT_EQ(swiglu_one(-0.0f, 5.0f), 0x8000);
  for (const float gate : {-104.0f, -200.0f, -1e6f, -FLT_MAX}) {
    EXPECT_EQ(value_of(swiglu_one(gate, 1.0f)), 0.0) << gate;  // no overflow of exp, no NaN
    EXPECT_EQ(value_of(swiglu_one(gate, -1e3f)), 0.0) << gate;
  }
  // Still a normal number: -88 exp(-88) = -5.33e-37. A flush to zero or a clamp would be detected.
  expect_swiglu(swiglu_one(-88.0f, 1.0f), -88.0, 1.0);
  EXPECT_EQ(value_of(swiglu_one(104.0f, 1.0f)), 104.0);
  EXPECT_EQ(value_of(swiglu_one(1e6f, 1.0f)), value_of(nearest_bf16(1e6)));
  EXPECT_EQ(swiglu_one(FLT_MAX, 1.0f), 0x7F80);  // rounds to infinity, like FLT_MAX itself
  EXPECT_EQ(swiglu_one(FLT_MAX, -2.0f), 0xFF80);
  EXPECT_EQ(swiglu_one(inf, 1.0f), 0x7F80);
  EXPECT_TRUE(std::isnan(value_of(swiglu_one(-inf, 1.0f))));
  EXPECT_TRUE(std::isnan(value_of(swiglu_one(nan, 1.0f))));
  EXPECT_TRUE(std::isnan(value_of(swiglu_one(1.0f, nan))));
}

TEST(RowMath, AddScaledMultipliesThenAdds) {
  // (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: rounding the product drops 2^-24; a fused multiply-add would keep it.
  const float factor = 1.0f + 0x1p-12f;
  std::vector<float> src(67, factor), sum(67, -1.0f);
  add_scaled(src.data(), factor, 67, sum.data());
  for (const float element : sum) ASSERT_EQ(element, 0x1p-11f);
}

// Tests all lengths around the vector sizes, at odd addresses; nothing is written outside the output.
TEST(RowMath, TailsAndAlignment) {
  for (int64_t n = 0; n <= 70; ++n) {
    for (int64_t shift = 0; shift < 3; ++shift) {
      const auto size = static_cast<size_t>(n + 8);
      std::vector<float> f(size), g(size), wide(size, -7.0f), sum(size, 1.0f);
      std::vector<uint16_t> narrow(size, 0xABCD), act(size, 0xABCD);
      for (size_t i = 0; i < size; ++i) {
        f[i] = 0.37f * static_cast<float>(i) - 9.0f;
        g[i] = 4.0f - 0.21f * static_cast<float>(i);
      }
      round_to_bf16(f.data() + shift, n, narrow.data() + shift);
      widen_bf16(narrow.data() + shift, n, wide.data() + shift);
      swiglu(f.data() + shift, g.data() + shift, n, act.data() + shift);
      add_scaled(f.data() + shift, 2.0f, n, sum.data() + shift);
      for (size_t i = 0; i < size; ++i) {
        const auto at = static_cast<int64_t>(i);
        const bool inside = at >= shift && at < shift + n;
        ASSERT_EQ(narrow[i], inside ? nearest_bf16(f[i]) : 0xABCD) << n << " " << i;
        ASSERT_EQ(wide[i], inside ? static_cast<float>(value_of(narrow[i])) : -7.0f) << n << " " << i;
        ASSERT_EQ(sum[i], inside ? 1.0f + 2.0f * f[i] : 1.0f) << n << " " << i;
        if (!inside) {
          ASSERT_EQ(act[i], 0xABCD) << n << " " << i;
        } else {
          ASSERT_NO_FATAL_FAILURE(expect_swiglu(act[i], f[i], g[i])) << n << " " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::detail

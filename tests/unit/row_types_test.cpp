// SPDX-License-Identifier: Apache-2.0
// Sizes of rows: every conversion of elements to bytes counts bits.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>

#include "switchyard/types.hpp"

namespace switchyard {
namespace {

TEST(RowTypes, HaveTheBitsOfTheirFormats) {
  EXPECT_EQ(dtype_bits(DType::bf16), 1 + 8 + 7);
  EXPECT_EQ(dtype_bits(DType::f16), 1 + 5 + 10);
  EXPECT_EQ(dtype_bits(DType::f32), 1 + 8 + 23);
  EXPECT_EQ(dtype_bits(DType::fp8_e4m3), 1 + 4 + 3);
  for (const int64_t n : {0, 1, 7, 7168}) {
    EXPECT_EQ(dtype_bytes(DType::bf16, n), static_cast<size_t>(2 * n));
    EXPECT_EQ(dtype_bytes(DType::f16, n), static_cast<size_t>(2 * n));
    EXPECT_EQ(dtype_bytes(DType::f32, n), static_cast<size_t>(4 * n));
    EXPECT_EQ(dtype_bytes(DType::fp8_e4m3, n), static_cast<size_t>(n));
  }
}

// Compares with bytes that are counted bit by bit.
TEST(RowTypes, PackedBytesCountEveryBit) {
  for (int bits = 1; bits <= 64; ++bits) {
    int64_t bytes = 0, left = 0;  // bytes in use, and unused bits of the last one
    for (int64_t n = 0; n <= 100; ++n) {
      ASSERT_EQ(detail::packed_bytes(n, bits), bytes) << n << " elements of " << bits << " bits";
      for (int b = 0; b < bits; ++b) {
        if (left == 0) ++bytes, left = 8;
        --left;
      }
    }
  }
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(detail::packed_bytes(kMax, 8), kMax);
  EXPECT_EQ(detail::packed_bytes(kMax, 4), kMax / 2 + 1);
  EXPECT_EQ(detail::packed_bytes(kMax, 1), kMax / 8 + 1);
}

}  // namespace
}  // namespace switchyard

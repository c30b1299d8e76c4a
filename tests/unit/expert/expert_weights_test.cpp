// SPDX-License-Identifier: Apache-2.0
// The demo weights: their closed form, their spread, and the magnitude of the resulting outputs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "gemm_testing.hpp"
#include "switchyard/expert.hpp"

namespace switchyard {
namespace {

using testing::normal_bf16;
using testing::value_of;

struct Width {
  int64_t hidden, intermediate;
};

// The expected values were computed once by an independent program from the documented closed form.
TEST(ExpertWeights, ClosedForm) {
  const ExpertWeights weights(42, 64, 48);
  EXPECT_EQ(weights.w13(0, 0, 0), 0xBD08);
  EXPECT_EQ(weights.w13(255, 95, 63), 0xBE28);
  EXPECT_EQ(weights.w2(3, 17, 41), 0xBEAB);
  EXPECT_EQ(ExpertWeights(43, 64, 48).w2(3, 17, 41), 0x3E86);
}

TEST(ExpertWeights, FillWritesTheElements) {
  for (const Width width : {Width{64, 48}, Width{13, 9}, Width{1, 1}}) {
    const ExpertWeights weights(7, width.hidden, width.intermediate);
    std::vector<uint16_t> w13(static_cast<size_t>(2 * width.hidden * width.intermediate)), w2(w13.size() / 2);
    weights.source(1000)(5, w13, w2);
    for (int64_t row = 0; row < 2 * width.intermediate; ++row) {
      for (int64_t col = 0; col < width.hidden; ++col) {
        ASSERT_EQ(w13[static_cast<size_t>(row * width.hidden + col)], weights.w13(1005, row, col));
      }
    }
    for (int64_t row = 0; row < width.hidden; ++row) {
      for (int64_t col = 0; col < width.intermediate; ++col) {
        ASSERT_EQ(w2[static_cast<size_t>(row * width.intermediate + col)], weights.w2(1005, row, col));
      }
    }
    EXPECT_THROW(weights.fill(0, {w13.data(), w13.size() - 1}, w2), Error);
    EXPECT_THROW(weights.fill(0, w13, {w2.data(), w2.size() - 1}), Error);
  }
  EXPECT_THROW(ExpertWeights(0, 0, 1), Error);
  EXPECT_THROW(ExpertWeights(0, 1, -1), Error);
}

TEST(ExpertWeights, SpreadAndIndependence) {
  constexpr int64_t kH = 256, kI = 128;
  const ExpertWeights weights(1, kH, kI);
  std::vector<uint16_t> a13(2 * kH * kI), a2(kH * kI), b13(a13.size()), b2(a2.size());
  weights.fill(0, a13, a2);
  weights.fill(1, b13, b2);
  const auto moment = [](const std::vector<uint16_t>& left, const std::vector<uint16_t>& right) {
    double sum = 0;
    for (size_t i = 0; i < left.size(); ++i) sum += value_of(left[i]) * value_of(right[i]);
    return sum / static_cast<double>(left.size());
  };
  EXPECT_NEAR(moment(a13, a13) * kH, 1.0, 0.03);
  EXPECT_NEAR(moment(a2, a2) * kI * 0.3557, 1.0, 0.03);
  EXPECT_NEAR(moment(a13, b13) * kH, 0.0, 0.02);  // 65536 products: deviation 0.004
  EXPECT_NEAR(moment(a2, b2) * kI * 0.3557, 0.0, 0.03);
  // Neighboring rows are also uncorrelated.
  const std::vector<uint16_t> upper(a13.begin(), a13.end() - kH), lower(a13.begin() + kH, a13.end());
  EXPECT_NEAR(moment(upper, lower) * kH, 0.0, 0.02);
}

TEST(ExpertWeights, OutputsAreOfOrderOne) {
  constexpr int64_t kH = 256, kI = 192, kRows = 64;
  const ExpertWeights weights(5, kH, kI);
  ExpertMlp mlp({kH, kI, 2}, weights.source(30));
  const std::vector<uint16_t> x = normal_bf16(2 * kRows * kH, 1.0, 8);
  std::vector<uint16_t> y(x.size());
  mlp.forward(x.data(), std::vector<int64_t>{0, kRows}, std::vector<int64_t>{kRows, kRows}, y.data());
  double sum = 0;
  for (const uint16_t element : y) sum += value_of(element) * value_of(element);
  EXPECT_NEAR(std::sqrt(sum / static_cast<double>(y.size())), 1.0, 0.15);
}

}  // namespace
}  // namespace switchyard

// SPDX-License-Identifier: Apache-2.0
// The oracle itself, on values worked out by hand: a wrong oracle would make every other test worthless.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "oracle/rows.hpp"

namespace {

using oracle::DType;
using oracle::ScaleKind;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Numbers, KnownCodes) {
  using oracle::encode;
  EXPECT_EQ(encode(oracle::kBf16, 1.0), 0x3F80u);
  EXPECT_EQ(encode(oracle::kBf16, -0.0), 0x8000u);
  EXPECT_EQ(encode(oracle::kBf16, 1.00390625), 0x3F80u);              // tie: even
  EXPECT_EQ(encode(oracle::kBf16, 1.01171875), 0x3F82u);              // tie: up to even
  EXPECT_EQ(encode(oracle::kBf16, std::ldexp(511.0, 119)), 0x7F80u);  // half a step past the largest
  EXPECT_EQ(encode(oracle::kBf16, 3.3961775e38), 0x7F7Fu);
  EXPECT_EQ(encode(oracle::kBf16, 9.1835496e-41), 0x0001u);  // smallest subnormal
  EXPECT_EQ(encode(oracle::kF16, 65504.0), 0x7BFFu);
  EXPECT_EQ(encode(oracle::kF16, 65520.0), 0x7C00u);
  EXPECT_EQ(encode(oracle::kF16, 65519.99), 0x7BFFu);
  EXPECT_EQ(encode(oracle::kF16, std::ldexp(1.0, -25)), 0u);  // tie with zero
  EXPECT_EQ(encode(oracle::kF16, std::ldexp(1.5, -25)), 1u);
  EXPECT_EQ(encode(oracle::kE4m3, 448.0), 0x7Eu);
  EXPECT_EQ(encode(oracle::kE4m3, 1e9), 0x7Eu);
  EXPECT_EQ(encode(oracle::kE4m3, -kInf), 0xFEu);
  EXPECT_EQ(encode(oracle::kE4m3, kNan), 0x7Fu);
  EXPECT_EQ(encode(oracle::kE4m3, 0.001953125), 0x01u);
  EXPECT_EQ(encode(oracle::kE4m3, 0.0009765625), 0x00u);  // tie: even
  EXPECT_EQ(encode(oracle::kE4m3, 1.0625), 0x38u);        // tie: even
  EXPECT_EQ(encode(oracle::kE4m3, 1.1875), 0x3Au);
}

TEST(Numbers, EveryCodeSurvives) {
  for (const auto& [format, codes] : {std::pair{oracle::kBf16, 65536u}, {oracle::kF16, 65536u}, {oracle::kE4m3, 256u}}) {
    for (uint32_t code = 0; code < codes; ++code) {
      const double value = oracle::decode(format, code);
      if (std::isnan(value)) continue;
      ASSERT_EQ(oracle::encode(format, value), code);
    }
  }
}

TEST(Numbers, RoundingIsNearest) {
  for (const auto& format : {oracle::kBf16, oracle::kF16, oracle::kE4m3}) {
    for (uint64_t i = 0; i < 20000; ++i) {
      const auto bits = static_cast<uint32_t>(oracle::mix(1, i));
      float value;
      std::memcpy(&value, &bits, 4);
      if (format.mantissa_bits != 7)
        value = std::ldexp(static_cast<float>(bits % 100003) - 50000.0f, static_cast<int>(bits >> 20) % 40 - 30);
      const uint32_t code = oracle::encode(format, value);
      const double rounded = oracle::decode(format, code);
      if (!std::isfinite(value) || std::isinf(rounded)) continue;
      const uint32_t magnitude = code & ((1u << (format.exponent_bits + format.mantissa_bits)) - 1);
      for (const uint32_t neighbour : {magnitude ? code - 1 : code, code + 1}) {
        const double other = oracle::decode(format, neighbour);
        if (!std::isfinite(other)) continue;
        ASSERT_LE(std::fabs(value - rounded), std::fabs(value - other)) << value;
      }
    }
  }
}

std::vector<uint8_t> quantised(const std::vector<float>& row, ScaleKind kind, std::vector<float>& scales) {
  std::vector<uint8_t> codes(row.size()), bytes(switchyard::scale_row_bytes(static_cast<int64_t>(row.size()), kind));
  oracle::quantise(DType::f32, row.data(), static_cast<int64_t>(row.size()), kind, codes.data(), bytes.data());
  scales.clear();
  for (int64_t g = 0; g < switchyard::num_scales(static_cast<int64_t>(row.size())); ++g)
    scales.push_back(oracle::scale_value(kind, bytes.data(), g));
  return codes;
}

TEST(Quantise, KnownGroups) {
  std::vector<float> row(300, 0.0f), scales;
  row[0] = 896.0f;  // scale 2
  row[1] = 2.0f;    // 1.0
  row[2] = -0.0f;
  row[130] = 1e-45f;  // scale underflows: a zero group
  row[256] = kInf;    // last group: 44 channels
  row[257] = -448.0f;
  row[258] = kNan;
  auto q = quantised(row, ScaleKind::f32, scales);
  EXPECT_EQ(scales, (std::vector<float>{2.0f, 0.0f, 1.0f}));
  EXPECT_EQ(q[0], 0x7E);
  EXPECT_EQ(q[1], 0x38);
  EXPECT_EQ(q[2], 0x80);
  EXPECT_EQ(q[130], 0);
  EXPECT_EQ(q[256], 0x7E);
  EXPECT_EQ(q[257], 0xFE);
  EXPECT_EQ(q[258], 0x7F);
  row[0] = 897.0f;
  q = quantised(row, ScaleKind::ue8m0, scales);
  EXPECT_EQ(scales, (std::vector<float>{4.0f, std::ldexp(1.0f, -127), 1.0f}));
  EXPECT_EQ(q[1], 0x30);  // 0.5
  EXPECT_EQ(q[130], 0);
}

TEST(Combine, OrdersDiffer) {
  // In f32, 2^24 + 1 = 2^24. Rank 0 holds 2^24 and 1 (k = 0, 2), rank 1 holds 1 (k = 1).
  const float big = 16777216.0f, one = 1.0f;
  const std::vector<oracle::Term> by_k{{&big, 1, 0}, {&one, 1, 1}, {&one, 1, 0}};
  oracle::SumSpec spec;
  spec.type = DType::f32;
  spec.hidden = 1;
  float out = 0;
  spec.order = oracle::CombineOrder::per_route;
  oracle::combine_row(spec, by_k, &out);
  EXPECT_EQ(out, 16777216.0f);
  const std::vector<oracle::Term> reordered{{&one, 1, 0}, {&big, 1, 1}, {&one, 1, 0}};
  oracle::combine_row(spec, reordered, &out);
  EXPECT_EQ(out, 16777216.0f);  // (1 + 2^24) + 1
  spec.order = oracle::CombineOrder::per_rank;
  oracle::combine_row(spec, reordered, &out);
  EXPECT_EQ(out, 16777218.0f);  // (1 + 1) + 2^24
}

TEST(Combine, BiasWeightsAndZero) {
  const float x = 3.0f, b0 = -0.0f, b1 = 2.0f;
  oracle::SumSpec spec;
  spec.type = DType::f32;
  spec.hidden = 1;
  float out = 7;
  oracle::combine_row(spec, {}, &out);
  EXPECT_EQ(out, 0.0f);
  EXPECT_FALSE(std::signbit(out));
  spec.bias[0] = &b0;
  oracle::combine_row(spec, {}, &out);
  EXPECT_TRUE(std::signbit(out));
  spec.bias[1] = &b1;
  spec.weighted = true;
  oracle::combine_row(spec, {{&x, 0.5f, 0}}, &out);
  EXPECT_EQ(out, 3.5f);
}

TEST(Routing, CapacityByHand) {
  oracle::Problem p;
  p.world = 1;
  p.experts = 2;
  p.topk = 2;
  p.max_tokens = 3;
  p.layout = oracle::Layout::expert_major;
  p.alignment = 4;
  p.ids = {{0, 1, 1, 1, 0, -1}};
  auto x = oracle::expect(p);
  EXPECT_EQ(x.ranks[0].rows, 8);
  EXPECT_EQ(x.ranks[0].expert_first_row, (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(x.ranks[0].route_row, (std::vector<int32_t>{0, 4, 5, 6, 1, -1}));
  EXPECT_EQ(oracle::worst_case_rows(p, 0), 4 + 8);
  p.size = oracle::SizePolicy::capacity;
  p.capacity = {6};
  EXPECT_TRUE(oracle::expect(p).capacity_exceeded);
  p.overflow = oracle::Overflow::drop_and_report;
  x = oracle::expect(p);
  EXPECT_EQ(x.ranks[0].rows, 6);
  EXPECT_EQ(x.ranks[0].dropped, (std::vector<uint8_t>{0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(x.ranks[0].tokens_per_expert, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(x.ranks[0].aligned_per_expert, (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(x.ranks[0].dropped_per_source, (std::vector<int64_t>{0, 1}));
}

}  // namespace

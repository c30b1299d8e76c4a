// SPDX-License-Identifier: Apache-2.0
// Tests the oracle itself with values worked out by hand: a wrong oracle would invalidate all other tests.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "oracle/ledger.hpp"
#include "oracle/low_latency.hpp"
#include "oracle/rows.hpp"
#include "oracle/views.hpp"

namespace {

using oracle::DType;
using oracle::ScaleKind;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Numbers, KnownCodes) {
  using oracle::encode;
  EXPECT_EQ(encode(oracle::kBf16, 1.0), 0x3F80u);
  EXPECT_EQ(encode(oracle::kBf16, -0.0), 0x8000u);
  EXPECT_EQ(encode(oracle::kBf16, 1.00390625), 0x3F80u);              // tie: to even
  EXPECT_EQ(encode(oracle::kBf16, 1.01171875), 0x3F82u);              // tie: up, to even
  EXPECT_EQ(encode(oracle::kBf16, std::ldexp(511.0, 119)), 0x7F80u);  // half a step beyond the largest value
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

/// The functions for elements and rows use faster methods than encode and decode.
TEST(Numbers, RowsAreCodesOneByOne) {
  struct Of {
    DType type;
    oracle::Format format;
    size_t bytes;
  };
  for (const Of& of : {Of{DType::bf16, oracle::kBf16, 2}, {DType::f16, oracle::kF16, 2}, {DType::fp8_e4m3, oracle::kE4m3, 1}}) {
    for (uint32_t code = 0; code < (of.bytes == 2 ? 65536u : 256u); ++code) {
      float value, row;
      oracle::load_row(of.type, &code, 1, &row);  // little endian
      value = oracle::load(of.type, &code, 0);
      const double exact = oracle::decode(of.format, code);
      if (std::isnan(exact)) {
        ASSERT_TRUE(std::isnan(value) && std::isnan(row)) << code;
        continue;
      }
      ASSERT_EQ(static_cast<double>(value), exact);
      ASSERT_EQ(static_cast<double>(row), exact);
      ASSERT_EQ(std::signbit(value), std::signbit(exact));
    }
    for (uint64_t i = 0; i < 200000; ++i) {
      auto bits = static_cast<uint32_t>(oracle::mix(2, i));
      if (i % 4 == 0) bits &= 0xFFFF8000u;                        // ties of bf16
      if (i % 4 == 1) bits &= 0xFFFFF000u;                        // ties of f16
      if (i % 4 == 2) bits = (bits & 0x87FFFFFFu) | 0x38000000u;  // magnitudes around 1
      float value;
      std::memcpy(&value, &bits, 4);
      const uint32_t expected = oracle::encode(of.format, static_cast<double>(value));
      uint32_t code = 0, row = 0;
      oracle::store(of.type, &code, 0, value);
      oracle::store_row(of.type, &value, 1, &row);
      ASSERT_EQ(code, expected) << value;
      ASSERT_EQ(row, expected) << value;
      if (std::isnan(value)) continue;
      ASSERT_EQ(static_cast<double>(oracle::rounded(of.type, value)), oracle::decode(of.format, expected));
    }
  }
}

TEST(Numbers, TiesGoToEvenAndNeighboursDoNot) {
  using oracle::rounded;
  // 1 + 2^-8 lies between the bf16 values 1 and 1 + 2^-7; 1 + 3 * 2^-8 lies between 1 + 2^-7 and 1 + 2^-6.
  EXPECT_EQ(rounded(DType::bf16, 1.0f + 0x1p-8f), 1.0f);
  EXPECT_EQ(rounded(DType::bf16, 1.0f + 0x1p-8f + 0x1p-20f), 1.0f + 0x1p-7f);
  EXPECT_EQ(rounded(DType::bf16, 1.0f + 3 * 0x1p-8f), 1.0f + 0x1p-6f);
  EXPECT_EQ(rounded(DType::f16, 1.0f + 0x1p-11f), 1.0f);
  EXPECT_EQ(rounded(DType::f16, 1.0f + 3 * 0x1p-11f), 1.0f + 0x1p-9f);
  EXPECT_EQ(rounded(DType::fp8_e4m3, 17.0f), 16.0f);
  EXPECT_EQ(rounded(DType::fp8_e4m3, 19.0f), 20.0f);
  EXPECT_EQ(rounded(DType::fp8_e4m3, 1e6f), 448.0f);
  EXPECT_EQ(rounded(DType::fp8_e4m3, kInf), 448.0f);
  EXPECT_TRUE(std::isinf(rounded(DType::f16, 65520.0f)));
  EXPECT_EQ(rounded(DType::f16, 65519.0f), 65504.0f);
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
  std::vector<uint8_t> codes(row.size()), bytes(switchyard::scale_row_bytes(static_cast<int64_t>(row.size()), kind), 0xEE);
  oracle::quantise(DType::f32, row.data(), static_cast<int64_t>(row.size()), kind, codes.data(), bytes.data());
  scales.clear();
  for (int64_t g = 0; g < switchyard::num_scales(static_cast<int64_t>(row.size())); ++g)
    scales.push_back(oracle::scale_value(kind, bytes.data(), g));
  for (size_t i = scales.size() * (kind == ScaleKind::f32 ? 4 : 1); i < bytes.size(); ++i) EXPECT_EQ(bytes[i], 0) << "padding";
  return codes;
}

TEST(Quantise, KnownGroups) {
  std::vector<float> row(300, 0.0f), scales;
  row[0] = 896.0f;  // scale 2
  row[1] = 2.0f;    // 1.0
  row[2] = -0.0f;
  row[130] = 1e-45f;  // scale underflows: a zero group
  row[256] = kInf;    // last group: 44 columns
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

TEST(Quantise, AShortGroupOfZeros) {
  std::vector<float> row(130, 0.0f), scales;
  row[0] = 448.0f;
  row[1] = -224.0f;
  auto q = quantised(row, ScaleKind::f32, scales);
  EXPECT_EQ(scales, (std::vector<float>{1.0f, 0.0f}));
  EXPECT_EQ(oracle::load(DType::fp8_e4m3, q.data(), 0), 448.0f);
  EXPECT_EQ(oracle::load(DType::fp8_e4m3, q.data(), 1), -224.0f);
  EXPECT_EQ(q[129], 0);
  row[0] = 449.0f;  // scale just above 1: the next power of two is 2
  q = quantised(row, ScaleKind::ue8m0, scales);
  EXPECT_EQ(scales, (std::vector<float>{2.0f, std::ldexp(1.0f, -127)}));
  EXPECT_EQ(oracle::load(DType::fp8_e4m3, q.data(), 1), -112.0f);
}

TEST(Combine, OrdersDiffer) {
  // In f32, 2^24 + 1 = 2^24. Rank 0 holds 2^24 and 1 (k = 0, 2), and rank 1 holds 1 (k = 1).
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

TEST(Combine, NothingButMinusZeros) {
  const float zero = -0.0f;
  oracle::SumSpec spec;
  spec.type = DType::f32;
  spec.hidden = 1;
  spec.bias[0] = spec.bias[1] = &zero;
  const auto negative = [&] {
    float out = 1;
    oracle::combine_row(spec, {{&zero, 1, 0}}, &out);
    return out == 0 && std::signbit(out);
  };
  spec.pre_reduced = true;  // a rank's row is added unchanged
  EXPECT_TRUE(negative());
  spec.pre_reduced = false;  // a sum of a rank's rows starts from +0
  EXPECT_FALSE(negative());
  spec.order = oracle::CombineOrder::per_route;
  EXPECT_TRUE(negative());
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

/// There are 5 experts: 3 on rank 0 and 2 on rank 1. Rank 0 has two tokens; rank 1 has one token, which selects the same expert
/// twice.
oracle::Problem two_ranks(oracle::Layout layout) {
  oracle::Problem p;
  p.world = 2;
  p.experts = 5;
  p.topk = 2;
  p.max_tokens = 2;
  p.layout = layout;
  p.alignment = 4;
  p.ids = {{0, 4, -1, 3}, {2, 2}};
  p.weights = {{0.25f, 0.75f, 0.5f, 0.5f}, {0.125f, 0.875f}};
  return p;
}

TEST(Routing, RankMajorRowsByHand) {
  const oracle::Problem p = two_ranks(oracle::Layout::rank_major);
  EXPECT_EQ(p.first_expert(1), 3);
  EXPECT_EQ(p.owner(2), 0);
  EXPECT_EQ(p.owner(3), 1);
  const auto first = oracle::rows_to(p, 0), second = oracle::rows_to(p, 1);
  ASSERT_EQ(first.size(), 2u);  // (0, 0), (1, 0)
  EXPECT_EQ(first[1].source, 1);
  EXPECT_EQ(first[1].k, -1);
  ASSERT_EQ(second.size(), 2u);  // (0, 0), (0, 1)
  EXPECT_EQ(second[1].token, 1);
  const oracle::Received r = oracle::received(p, 0);
  EXPECT_EQ(r.tokens_per_expert, (std::vector<int64_t>{1, 0, 2}));
  EXPECT_EQ(r.aligned_per_expert, (std::vector<int64_t>{4, 0, 4}));
  EXPECT_EQ(r.topk_ids, (std::vector<int32_t>{0, -1, 2, 2}));
  EXPECT_EQ(r.topk_weights, (std::vector<float>{0.25f, 0, 0.125f, 0.875f}));
  const oracle::Owned o = oracle::owned(p, 0);
  ASSERT_EQ(o.sends[0].size(), 2u);
  EXPECT_EQ(o.sends[0][1].rank, 1);
  EXPECT_EQ(o.sends[0][1].row, 0);
  ASSERT_EQ(o.sends[1].size(), 1u);
  EXPECT_EQ(o.sends[1][0].row, 1);
  EXPECT_EQ(o.kept_ids, (std::vector<int32_t>{0, 4, -1, 3}));
}

TEST(Routing, ExpertMajorRowsByHand) {
  const oracle::Problem p = two_ranks(oracle::Layout::expert_major);
  const auto rows = oracle::rows_to(p, 0);
  ASSERT_EQ(rows.size(), 8u);  // expert 0: one row, padded to 4; expert 1: none; expert 2: two, padded to 4
  EXPECT_EQ(rows[0].k, 0);
  EXPECT_EQ(rows[1].source, -1);
  EXPECT_EQ(rows[4].source, 1);
  EXPECT_EQ(rows[5].k, 1);
  EXPECT_EQ(oracle::owned(p, 1).route_row, (std::vector<int32_t>{4, 5}));
}

/// The views computed for a single rank equal those computed for all ranks.
TEST(Routing, OneRanksViewIsThatOfAll) {
  for (const auto layout : {oracle::Layout::rank_major, oracle::Layout::expert_major}) {
    oracle::Problem p = two_ranks(layout);
    for (const int64_t capacity : {-1, 1, 5}) {
      if (capacity >= 0) {
        p.size = oracle::SizePolicy::capacity;
        p.overflow = oracle::Overflow::drop_and_report;
        p.capacity = {capacity, capacity};
      }
      const oracle::Expected x = oracle::expect(p);
      for (int rank = 0; rank < p.world; ++rank) {
        const oracle::RankView& all = x.ranks[static_cast<size_t>(rank)];
        const oracle::Received r = oracle::received(p, rank);
        const oracle::Owned o = oracle::owned(p, rank);
        EXPECT_EQ(r.rows, all.rows);
        EXPECT_EQ(r.rows_needed, all.rows_needed);
        EXPECT_EQ(r.record_route, all.record_route);
        EXPECT_EQ(r.dropped_per_source, all.dropped_per_source);
        EXPECT_EQ(o.kept_ids, all.kept_ids);
        EXPECT_EQ(o.route_row, all.route_row);
        EXPECT_EQ(o.dropped, all.dropped);
        EXPECT_EQ(static_cast<int64_t>(oracle::rows_to(p, rank).size()), all.rows_needed);
      }
    }
  }
}

TEST(Views, MatricesByHand) {
  oracle::Problem p;
  p.world = 2;
  p.experts = 4;
  p.topk = 2;
  p.max_tokens = 3;
  p.ids = {{0, 2, 3, 3, -1, 1}, {1, 0, 2, 9}};
  const auto m = oracle::matrices(p, oracle::expect(p), 0, 2);  // channels: tokens {0, 1} and {2}; on rank 1: {0} and {1}
  using Ints = std::vector<int32_t>;
  EXPECT_EQ(m.rank_prefix, (Ints{2, 2, 3, 3}));
  EXPECT_EQ(m.channel_prefix, (Ints{1, 2, 2, 2}));
  EXPECT_EQ(m.recv_src_idx, (Ints{0, 2, 0}));
  EXPECT_EQ(m.recv_channel_prefix, (Ints{0, 1, 0, 1}));
  EXPECT_EQ(m.is_token_in_rank, (std::vector<uint8_t>{1, 1, 0, 1, 1, 0}));
  EXPECT_EQ(m.send_head, (Ints{0, 0, -1, 1, 0, -1}));
  const auto c = oracle::routing_counts(p, 0);
  EXPECT_EQ(c.tokens_per_rank, (Ints{2, 2}));
  EXPECT_EQ(c.tokens_per_expert, (Ints{1, 1, 1, 2}));
  EXPECT_EQ(c.is_token_in_rank, m.is_token_in_rank);
}

TEST(Views, LedgerByHand) {
  oracle::Problem p = two_ranks(oracle::Layout::expert_major);
  const auto l = oracle::ledger(p, 0);
  using Ints = std::vector<int32_t>;
  EXPECT_EQ(l.padded, 16);
  EXPECT_EQ(Ints(l.peer_token_per_expert.begin(), l.peer_token_per_expert.begin() + 5), (Ints{1, 0, 0, 1, 1}));
  EXPECT_EQ(Ints(l.cumsum_per_expert.begin() + 16, l.cumsum_per_expert.begin() + 22), (Ints{0, 0, 2, 2, 2, 2}));
  EXPECT_EQ(l.expanded_row_idx, (Ints{0, 2, -1, 1}));
  EXPECT_EQ(l.dispatch_offset, (Ints{0, 4, 4}));
  EXPECT_EQ(l.prev_sum_before_rank, (Ints{0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(oracle::returned_routes(p, 0), (std::vector<int64_t>{0, 3, 1}));
}

TEST(LowLatency, ArrivalsByHand) {
  const auto v = oracle::low_latency_view(two_ranks(oracle::Layout::expert_major), 0);
  EXPECT_EQ(v.rows_of_expert, (std::vector<int32_t>{1, 0, 1}));  // an expert named twice gets one row
  EXPECT_EQ(v.arrivals[2][0].source, 1);
  EXPECT_EQ(v.arrivals[2][0].k, 0);
  const int64_t first = int64_t{1} << 32;
  EXPECT_EQ(v.source_range, (std::vector<int64_t>{1, first, 0, 0, 0, 1}));
}

TEST(LowLatency, PlacesOfScalesByHand) {
  // The scales of 3 groups are in rows or columns padded to multiples of 16 bytes; in columns, each word holds 4 UE8M0 scales
  // of a row.
  const oracle::ScaleShape rows{switchyard::ScaleOrder::row_major, ScaleKind::f32, 300, 128, 5};
  EXPECT_EQ(rows.offset(0, 1, 2), 16 + 8);
  EXPECT_EQ(rows.offset(1, 0, 0), 5 * 16);
  const oracle::ScaleShape columns{switchyard::ScaleOrder::column_major, ScaleKind::f32, 300, 128, 5};
  EXPECT_EQ(columns.column(), 8);
  EXPECT_EQ(columns.offset(0, 1, 2), (2 * 8 + 1) * 4);
  EXPECT_EQ(columns.offset(1, 0, 0), 3 * 8 * 4);
  const oracle::ScaleShape words{switchyard::ScaleOrder::column_major, ScaleKind::ue8m0, 300, 128, 5};
  EXPECT_EQ(words.offset(0, 1, 2), 4 + 2);
  EXPECT_EQ(words.offset(1, 0, 0), 8 * 4);
}

}  // namespace

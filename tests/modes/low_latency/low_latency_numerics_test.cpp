// SPDX-License-Identifier: Apache-2.0
// Maximum distance of a combined element from the exact sum (docs/concepts/low_latency.md, "Order and error of the sum"): the
// bounds hold, specially constructed data reaches them, and per_rank needs its larger bound. Also checks the error of rows sent
// as fp8 (case C2), element by element in the delivered rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "modes/low_latency/low_latency_script.hpp"
#include "modes/normal/normal_rig.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::Group;
using switchyard::LowLatencyExchange;

/// Pattern of a token's expert rows, and of its weights.
enum class Data {
  random,      ///< random signs and magnitudes
  positive,    ///< no signs
  cancelling,  ///< the second half of the ranks returns the negated rows of the first half, except for some lowest bits
  worst,       ///< each rank's partial sum is next to the midpoint of two numbers of the type, so all roundings err upwards
  worst_cancelling,  ///< like worst, but half of the partial sums are negative
};
constexpr Data kAllData[] = {Data::random, Data::positive, Data::cancelling, Data::worst, Data::worst_cancelling};

/// One token on rank 0 that goes to all experts; each rank has `each` experts.
struct Shape {
  int world, each;
  int topk() const { return world * each; }
};
std::ostream& operator<<(std::ostream& out, const Shape& s) { return out << "W" << s.world << "K" << s.topk(); }

constexpr int64_t kColumns = 1024;

int digits_of(DType type) { return type == DType::bf16 ? 8 : type == DType::f16 ? 11 : 24; }

struct Terms {
  std::vector<std::vector<std::byte>> rows;  ///< by k
  std::vector<float> weights;
};

Terms make_terms(const Shape& s, DType type, Data data) {
  const size_t bytes = switchyard::dtype_bytes(type, 1), row = switchyard::dtype_bytes(type, kColumns),
               half = static_cast<size_t>(s.topk()) / 2;
  const bool worst = data == Data::worst || data == Data::worst_cancelling;
  const bool cancels = data == Data::cancelling || data == Data::worst_cancelling;
  Terms t;
  for (size_t k = 0; k < static_cast<size_t>(s.topk()); ++k) {
    auto& mine = t.rows.emplace_back(row);
    const bool second = cancels && k >= half;
    if (worst) {
      // The first expert of a rank contributes the rank's whole sum: w * 2^j, where w in float32 is next to 1 + u.
      const double u = std::ldexp(1.0, -digits_of(type)), beside = std::ldexp(1.0, -22);
      const double w = k % static_cast<size_t>(s.each) != 0 ? 0 : second ? -(1 + u - beside) : 1 + u + beside;
      t.weights.push_back(static_cast<float>(w));
      for (int64_t c = 0; c < kColumns; ++c) oracle::store(type, mine.data(), c, std::ldexp(1.0f, static_cast<int>(c % 8) - 4));
      continue;
    }
    t.weights.push_back((0.3f + 0.1f * static_cast<float>(cancels ? k % half : k)) * (second ? -1.0f : 1.0f));
    oracle::fill_row(Pattern::random_values, 77, {cancels ? k % half : k, 0, 0}, type, kColumns, mine.data());
    for (int64_t c = 0; c < kColumns; ++c) {
      if (data == Data::positive) oracle::store(type, mine.data(), c, std::fabs(oracle::load(type, mine.data(), c)));
      if (second && k % 2 != 0) mine[static_cast<size_t>(c) * bytes] ^= std::byte{1};
    }
  }
  return t;
}

/// The results of combine on rank 0.
struct Sums {
  std::vector<std::byte> per_route, per_rank;
};

Sums combine(Group& group, const Shape& s, DType type, const Terms& terms) {
  LowLatencyConfig config;
  config.hidden = kColumns;
  config.num_experts = config.topk = s.topk();
  config.max_tokens = 1;
  config.dtype = type;
  LowLatencyExchange exchange(group, config);
  auto output = exchange.make_output();
  std::vector<int32_t> ids;
  for (int k = 0; k < s.topk(); ++k) ids.push_back(k);
  const int64_t tokens = group.rank() == 0 ? 1 : 0;
  switchyard::LowLatencyDispatchOptions options;
  options.topk_weights = terms.weights.data();
  exchange.dispatch({terms.rows[0].data(), tokens, kColumns, type}, switchyard::ExpertIds::of(ids.data(), tokens, s.topk()),
                    output, options);
  const switchyard::LowLatencyRows y = exchange.make_rows(type);
  const size_t row = terms.rows[0].size();
  const auto each = static_cast<size_t>(s.each), first = static_cast<size_t>(group.rank()) * each;
  for (size_t e = 0; e < each; ++e)  // R = world rows each, one of them used
    std::memcpy(static_cast<std::byte*>(y.data) + e * static_cast<size_t>(s.world) * row, terms.rows[first + e].data(), row);
  Sums sums{std::vector<std::byte>(row), std::vector<std::byte>(row)};
  exchange.combine(y, output, sums.per_route.data(), {CombineOrder::per_route});
  exchange.combine(y, output, sums.per_rank.data(), {CombineOrder::per_rank});
  return sums;
}

Sums combined(const Shape& s, DType type, const Terms& terms) {
  Sums sums;
  for (const Outcome& o : outcomes(s.world, options_with(60s), [&](Group& group) {
         Sums mine = combine(group, s, type, terms);
         if (group.rank() == 0) sums = std::move(mine);
       }))
    EXPECT_EQ(code_name(o.code), "ok") << o.text;
  return sums;
}

/// The exact terms of column c, and the rank of each.
oracle::ErrorBound bound_of(const Shape& s, DType type, const Terms& terms, int64_t c, double& magnitudes) {
  std::vector<double> exact;
  std::vector<int> ranks;
  magnitudes = 0;
  for (int k = 0; k < s.topk(); ++k) {
    const auto at = static_cast<size_t>(k);
    exact.push_back(static_cast<double>(terms.weights[at]) * static_cast<double>(oracle::load(type, terms.rows[at].data(), c)));
    ranks.push_back(k / s.each);
    magnitudes += std::fabs(exact.back());
  }
  return oracle::error_bound(type, s.world, exact, ranks);
}

/// Number of representable steps between two values of a 16-bit type.
int distance(uint16_t a, uint16_t b) {
  const auto place = [](uint16_t bits) { return (bits & 0x8000) != 0 ? -(bits & 0x7FFF) : bits & 0x7FFF; };
  return std::abs(place(a) - place(b));
}

class Numerics : public testing::TestWithParam<Shape> {};

TEST_P(Numerics, SumsStayWithinTheStatedBounds) {
  const Shape s = GetParam();
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const Data data : kAllData) {
      const std::string what =
          "type " + std::to_string(static_cast<int>(type)) + ", data " + std::to_string(static_cast<int>(data));
      const Terms terms = make_terms(s, type, data);
      const Sums sums = combined(s, type, terms);
      double of_per_route = 0, of_per_rank = 0, magnitudes = 0;
      int beyond_per_route = 0;
      for (int64_t c = 0; c < kColumns; ++c) {
        const auto bound = bound_of(s, type, terms, c, magnitudes);
        const auto error = [&](const std::vector<std::byte>& sum) {
          return std::fabs(static_cast<double>(oracle::load(type, sum.data(), c)) - bound.exact);
        };
        of_per_route = std::max(of_per_route, error(sums.per_route) / bound.per_route);
        of_per_rank = std::max(of_per_rank, error(sums.per_rank) / bound.per_rank);
        beyond_per_route += error(sums.per_rank) > bound.per_route;
      }
      EXPECT_LE(of_per_route, 1) << what;
      EXPECT_LE(of_per_rank, 1) << what;
      if (type == DType::f32) continue;  // its bound is the wide bound of float32 sums
      if (data == Data::worst) {
        EXPECT_GE(of_per_route, 0.95) << what;
      }
      if (data == Data::worst_cancelling) {
        EXPECT_GE(of_per_rank, 0.95) << what;
        EXPECT_EQ(beyond_per_route, kColumns) << what;
      }
      if (data == Data::random || data == Data::cancelling) {
        EXPECT_GE(of_per_rank, 0.5) << what;
        EXPECT_GT(beyond_per_route, 0) << what;
      }
    }
  }
}

/// Unless terms cancel to less than about 1/1000 of their size (f16: 1/100), float32 summation affects at most the last place.
TEST_P(Numerics, PerRouteIsTheExactSumRoundedOrItsNeighbour) {
  const Shape s = GetParam();
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const Data data : kAllData) {
      const Terms terms = make_terms(s, type, data);
      const Sums sums = combined(s, type, terms);
      int compared = 0;
      for (int64_t c = 0; c < kColumns; ++c) {
        double magnitudes = 0;
        const auto bound = bound_of(s, type, terms, c, magnitudes);
        const double f32_part = (s.topk() + s.world) * 0x1p-23 * magnitudes;
        if (f32_part > std::ldexp(std::fabs(bound.exact), -digits_of(type) - 1)) continue;
        uint16_t got;
        std::memcpy(&got, sums.per_route.data() + 2 * c, 2);
        const auto rounded =
            static_cast<uint16_t>(oracle::encode(type == DType::bf16 ? oracle::kBf16 : oracle::kF16, bound.exact));
        EXPECT_LE(distance(rounded, got), 1)
            << "type " << static_cast<int>(type) << " data " << static_cast<int>(data) << " column " << c;
        ++compared;
      }
      if (data == Data::random || data == Data::positive) {
        EXPECT_GE(compared, kColumns / 2);
      }
    }
  }
}

// --- Error of rows in transport

struct Fp8Rows {
  ScaleKind kind;
  int group;
  DType type;
  Pattern pattern;
};
std::ostream& operator<<(std::ostream& out, const Fp8Rows& r) {
  return out << "kind" << static_cast<int>(r.kind) << "_group" << r.group << "_type" << static_cast<int>(r.type) << "_pattern"
             << static_cast<int>(r.pattern);
}
std::vector<Fp8Rows> fp8_rows() {
  std::vector<Fp8Rows> all;
  for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0})
    for (const int group : {32, 64, 128})
      for (const DType type : {DType::bf16, DType::f16, DType::f32})
        for (const Pattern pattern : {Pattern::random_values, Pattern::wild_values, Pattern::quantise_cases})
          all.push_back({kind, group, type, pattern});
  return all;
}

/// Checks one group, given x and its codes. Counts the cases.
struct GroupCheck {
  int zero = 0, bounded = 0;
  void operator()(const std::vector<double>& x, const uint8_t* codes, double scale, ScaleKind kind) {
    double amax = 0;
    const bool infinite = std::any_of(x.begin(), x.end(), [](double v) { return std::isinf(v); });
    for (const double v : x)
      if (std::isfinite(v)) amax = std::max(amax, std::fabs(v));
    if (amax == 0 && infinite) amax = 448;  // an infinity remains visible even if all other elements are zero
    ASSERT_TRUE(std::isfinite(scale));
    ASSERT_GE(scale, 0);
    const double exact = amax / 448, smallest = kind == ScaleKind::f32 ? 0x1p-126 : 0x1p-127;
    if (amax == 0) ++zero;
    if (kind == ScaleKind::ue8m0) {  // the smallest power of two that suffices
      EXPECT_GE(scale * (1 + 0x1p-23), exact);
      EXPECT_TRUE(scale == smallest || scale / 2 <= exact) << scale << " for " << amax;
    } else if (exact > smallest) {
      EXPECT_LE(std::fabs(448 * scale - amax), 0x1p-23 * amax);
    }
    for (size_t c = 0; c < x.size(); ++c) {
      const double got = oracle::decode(oracle::kE4m3, codes[c]) * scale;
      if (std::isnan(x[c])) {
        EXPECT_TRUE(std::isnan(got));
      } else if (std::isinf(x[c])) {
        EXPECT_EQ(codes[c], x[c] > 0 ? 0x7E : 0xFE);
        EXPECT_NE(got, 0) << "of a group of amax " << amax;
      } else if (amax == 0) {
        EXPECT_EQ(codes[c], 0) << x[c];
      } else if (std::isfinite(x[c]) && scale >= smallest) {  // a smaller float32 scale has itself lost digits
        EXPECT_LE(std::fabs(got - x[c]), std::max(std::fabs(x[c]) / 16, scale * 0x1p-10) * (1 + 0x1p-20)) << x[c];
        ++bounded;
      }
    }
  }
};

class LowLatencyRows : public testing::TestWithParam<Fp8Rows> {};

TEST_P(LowLatencyRows, LoseAtMostASixteenthOrAFractionOfTheScale) {
  constexpr int64_t kTokens = 16, kHidden = 528;
  const Fp8Rows& r = GetParam();
  const size_t bytes = switchyard::dtype_bytes(r.type, kHidden);
  std::vector<std::byte> rows(kTokens * bytes);
  for (size_t t = 0; t < kTokens; ++t) oracle::fill_row(r.pattern, 9, {t, 0, 0}, r.type, kHidden, rows.data() + t * bytes);
  const std::vector<int32_t> ids(kTokens, 0);
  GroupCheck check;
  for (const Outcome& o : outcomes(1, options_with(60s), [&](Group& group) {
         LowLatencyConfig config;
         config.hidden = kHidden;
         config.num_experts = config.topk = 1;
         config.max_tokens = kTokens;
         config.dtype = r.type;
         config.scales = r.kind;
         config.scale_group = r.group;
         LowLatencyExchange exchange(group, config);
         auto output = exchange.make_output();
         exchange.dispatch({rows.data(), kTokens, kHidden, r.type}, switchyard::ExpertIds::of(ids.data(), kTokens, 1), output);
         const auto* const codes = static_cast<const uint8_t*>(output.x.data);
         const auto* const scales = static_cast<const std::byte*>(output.x.scales);
         for (int64_t t = 0; t < kTokens; ++t) {
           for (int64_t begin = 0; begin < kHidden; begin += r.group) {
             std::vector<double> x;
             for (int64_t c = begin; c < std::min<int64_t>(kHidden, begin + r.group); ++c)
               x.push_back(static_cast<double>(oracle::load(r.type, rows.data() + t * static_cast<int64_t>(bytes), c)));
             const auto row = static_cast<int64_t>(switchyard::scale_row_bytes(kHidden, r.kind, r.group));
             const float scale = oracle::scale_value(r.kind, scales + t * row, begin / r.group);
             check(x, codes + t * kHidden + begin, static_cast<double>(scale), r.kind);
           }
         }
       }))
    EXPECT_EQ(code_name(o.code), "ok") << o.text;
  EXPECT_GT(check.bounded, 0);
  EXPECT_TRUE(r.pattern != Pattern::quantise_cases || check.zero > 0);
}

INSTANTIATE_TEST_SUITE_P(Everywhere, LowLatencyRows, testing::ValuesIn(fp8_rows()),
                         [](const auto& s) { return testing::PrintToString(s.param); });
INSTANTIATE_TEST_SUITE_P(Everywhere, Numerics, testing::Values(Shape{2, 2}, Shape{8, 1}, Shape{4, 2}, Shape{8, 4}),
                         [](const auto& s) { return testing::PrintToString(s.param); });

}  // namespace
}  // namespace harness

// SPDX-License-Identifier: Apache-2.0
// Compares the gradients of SwiGLU and of routing weights, which are computed row by row, with float64.
#include <limits>
#include <string>
#include <utility>

#include "gpu/gemm/gradient_rig.hpp"
#include "gpu/gemm/host_rows.hpp"

namespace gemm_test {
namespace {

using switchyard::ConstRows;
using switchyard::DType;
using switchyard::ErrorCode;
using switchyard::ExpertRows;
using switchyard::RoutingGradient;
using switchyard::Rows;
using switchyard::SwigluGradient;

/// Expert ranges in GPU memory, with `gap` rows between them.
struct Ranges {
  Ranges(const std::vector<int64_t>& counts, int64_t gap) : num_rows(16 * 8), first_row(16 * 8) {
    for (const int64_t c : counts) {
      first.push_back(total += gap);
      total += c;
    }
    total += gap;
    num_rows.set(counts);
    first_row.set(first);
    rows.num_rows = num_rows.as<int64_t>();
    rows.first_row = first_row.as<int64_t>();
    for (size_t e = 0; e < counts.size(); ++e)
      for (int64_t r = 0; r < counts[e]; ++r) of_experts.push_back(first[e] + r);
  }

  DeviceBytes num_rows, first_row;
  std::vector<int64_t> first;
  std::vector<int64_t> of_experts;  ///< rows that belong to an expert
  int64_t total = 0;
  ExpertRows rows;
};

std::vector<int64_t> few_counts() { return {1, 0, 17, 300, 2, 64}; }

class RowTypes : public testing::TestWithParam<bool> {
 protected:
  bool f16() const { return GetParam(); }
  DType type() const { return f16() ? DType::f16 : DType::bf16; }
};
INSTANTIATE_TEST_SUITE_P(RowGradients, RowTypes, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& i) { return std::string(i.param ? "f16" : "bf16"); });

/// Rows with values in GPU memory.
struct Memory {
  Memory(int64_t rows_in, int64_t columns_in, bool f16, uint64_t seed, float scale)
      : bytes(rows_in * columns_in * 2), rows(rows_in), columns(columns_in), type(f16 ? DType::f16 : DType::bf16) {
    fill(bytes.as(), rows * columns, f16, Fill::normal, seed, scale);
  }
  Rows view() const { return {bytes.as(), rows, columns, type}; }
  Numbers numbers() const { return read_numbers(bytes.as(), rows * columns, type == DType::f16); }

  DeviceBytes bytes;
  int64_t rows, columns;
  DType type;
};

struct SwigluCase {
  SwigluNumbers numbers;
  int64_t columns;
};
std::vector<SwigluCase> swiglu_cases() {
  return {{{}, 8}, {{}, 1536}, {{INFINITY, 1.702, 0.25}, 264}, {{0.5, 1, 0}, 480}, {{1.5, 1.702, 1}, 2880}};
}

switchyard::SwigluGradientConfig config_of(const SwigluCase& c, DType type) {
  switchyard::SwigluGradientConfig config;
  config.num_experts = static_cast<int>(few_counts().size());
  config.columns = c.columns;
  config.dtype = type;
  config.swiglu.limit = static_cast<float>(c.numbers.limit);
  config.swiglu.alpha = static_cast<float>(c.numbers.alpha);
  config.swiglu.up_shift = static_cast<float>(c.numbers.shift);
  return config;
}

TEST_P(RowTypes, SwigluAgainstFloat64) {
  for (const SwigluCase& c : swiglu_cases()) {
    const Ranges ranges(few_counts(), 3);
    const Memory h(ranges.total, 2 * c.columns, f16(), 1, 1.5F), da(ranges.total, c.columns, f16(), 2, 1.F);
    const Memory dh(ranges.total, 2 * c.columns, f16(), 3, 1.F), a(ranges.total, c.columns, f16(), 4, 1.F);
    const Numbers dh_before = dh.numbers(), a_before = a.numbers();
    SwigluGradient gradient(config_of(c, type()));
    gradient.run(h.view(), da.view(), ranges.rows, dh.view(), a.view());
    const Numbers hs = h.numbers(), das = da.numbers();
    Numbers want_dh = dh_before, want_a = a_before;  // rows of no expert must stay unchanged
    for (const int64_t r : ranges.of_experts) {
      for (int64_t i = 0; i < c.columns; ++i) {
        const size_t gate = static_cast<size_t>(r * 2 * c.columns + i), up = gate + static_cast<size_t>(c.columns);
        const size_t at = static_cast<size_t>(r * c.columns + i);
        std::tie(want_dh[gate], want_dh[up]) = c.numbers.gradient(hs[gate], hs[up], das[at]);
        want_a[at] = c.numbers.out(hs[gate], hs[up]);
      }
    }
    const Numbers got_dh = dh.numbers(), got_a = a.numbers();
    const double unit = f16() ? 0x1p-10 : 0x1p-7;
    for (size_t i = 0; i < got_dh.size(); ++i)
      ASSERT_NEAR(got_dh[i], want_dh[i], unit * std::abs(want_dh[i]) + 1e-5)
          << "element " << i << " of dh, columns " << c.columns;
    for (size_t i = 0; i < got_a.size(); ++i)
      ASSERT_NEAR(got_a[i], want_a[i], unit * std::abs(want_a[i]) + 1e-5) << "element " << i << " of a, columns " << c.columns;
    EXPECT_LE(relative(got_dh, want_dh), 5e-3);
  }
}

TEST_P(RowTypes, SwigluInPlaceAndWithoutOutputs) {
  const SwigluCase c = swiglu_cases()[3];
  const Ranges ranges(few_counts(), 1);
  const Memory h(ranges.total, 2 * c.columns, f16(), 1, 1.5F), da(ranges.total, c.columns, f16(), 2, 1.F);
  const Memory dh(ranges.total, 2 * c.columns, f16(), 1, 1.5F), a(ranges.total, c.columns, f16(), 2, 1.F);
  SwigluGradient gradient(config_of(c, type()));
  gradient.run(h.view(), da.view(), ranges.rows, dh.view());  // `a` has the content of `da` and must keep it
  EXPECT_EQ(count_unequal(a.bytes.as(), da.bytes.as(), ranges.total * c.columns), 0);
  gradient.run(h.view(), da.view(), ranges.rows, dh.view(), a.view());
  gradient.run(h.view(), da.view(), ranges.rows, h.view(), da.view());
  EXPECT_EQ(count_unequal(h.bytes.as(), dh.bytes.as(), ranges.total * 2 * c.columns), 0);
  EXPECT_EQ(count_unequal(da.bytes.as(), a.bytes.as(), ranges.total * c.columns), 0);
}

// Clamped elements have gradient 0 for any incoming gradient; at the limit itself, the gradient passes.
TEST_P(RowTypes, ClampedElementsHaveNoGradient) {
  SwigluCase c{{2, 1, 0}, 8};
  const double gates[] = {-5, 1, 2, 2.5, 1, 1, 1, 1}, ups[] = {1, 1, 1, 1, 2, 2.5, -2, -2.5};
  const Memory h(1, 16, f16(), 1, 1.F), da(1, 8, f16(), 2, 1.F), dh(1, 16, f16(), 3, 1.F);
  std::vector<uint16_t> bits(16), ones(8, bits_of(1, f16()));
  for (size_t i = 0; i < 8; ++i) bits[i] = bits_of(gates[i], f16()), bits[8 + i] = bits_of(ups[i], f16());
  h.bytes.set(bits);
  da.bytes.set(ones);
  DeviceBytes count(8 * 6);
  count.set(std::vector<int64_t>{1, 0, 0, 0, 0, 0});
  ExpertRows rows;
  rows.num_rows = count.as<int64_t>();
  rows.rows_per_expert = 1;
  SwigluGradient gradient(config_of(c, type()));
  gradient.run(h.view(), da.view(), rows, dh.view());
  const Numbers got = dh.numbers();
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(got[i] == 0, i == 3) << "gate " << gates[i] << ": " << got[i];
    EXPECT_EQ(got[8 + i] == 0, i == 5 || i == 7) << "up " << ups[i] << ": " << got[8 + i];
  }
}

TEST_P(RowTypes, RoutingAgainstFloat64) {
  for (const int64_t columns : {8, 264, 2880, 7168}) {
    const Ranges ranges(few_counts(), 2);
    const Memory dy(ranges.total, columns, f16(), 1, 1.F), y(ranges.total, columns, f16(), 2, 1.F);
    const std::vector<float> before(static_cast<size_t>(ranges.total), 77.F);
    DeviceBytes dweight(ranges.total * 4), again(ranges.total * 4);
    dweight.set(before);
    again.set(before);
    RoutingGradient gradient({static_cast<int>(few_counts().size()), columns, type()});
    gradient.run(dy.view(), y.view(), ranges.rows, dweight.as<float>());
    gradient.run(dy.view(), y.view(), ranges.rows, again.as<float>(), {nullptr, 3});
    EXPECT_EQ(count_unequal(dweight.as(), again.as(), ranges.total * 2), 0) << "other multiprocessors, columns " << columns;
    const Numbers a = dy.numbers(), b = y.numbers();
    Numbers want(before.begin(), before.end()), size(before.size(), 0);
    for (const int64_t r : ranges.of_experts) {
      double sum = 0;
      for (int64_t i = r * columns; i < (r + 1) * columns; ++i) {
        sum += a[static_cast<size_t>(i)] * b[static_cast<size_t>(i)];
        size[static_cast<size_t>(r)] += std::abs(a[static_cast<size_t>(i)] * b[static_cast<size_t>(i)]);
      }
      want[static_cast<size_t>(r)] = sum;
    }
    const Numbers got = read_floats(dweight.as(), ranges.total);
    for (size_t r = 0; r < got.size(); ++r)
      ASSERT_NEAR(got[r], want[r], 1e-6 * size[r]) << "row " << r << ", columns " << columns;
  }
}

// Counts are read when the kernels run, and impossible counts mean no rows. Covers masked rows, too.
TEST_P(RowTypes, RowsOfNobodyAreNotTouched) {
  constexpr int64_t kEach = 10, kColumns = 40;
  DeviceBytes counts(3 * 4);
  counts.set(std::vector<int32_t>{4, -3, 1 << 30});
  ExpertRows rows;
  rows.num_rows_32 = counts.as<int32_t>();
  rows.rows_per_expert = kEach;
  const Memory h(3 * kEach, 2 * kColumns, f16(), 1, 1.F), da(3 * kEach, kColumns, f16(), 2, 1.F);
  const Memory dh(3 * kEach, 2 * kColumns, f16(), 3, 1.F);
  DeviceBytes dweight(3 * kEach * 4);
  dweight.set(std::vector<float>(3 * kEach, 77.F));
  const Numbers before = dh.numbers();
  SwigluGradient swiglu({3, kColumns, type(), {}});
  RoutingGradient routing({3, kColumns, type()});
  swiglu.run(h.view(), da.view(), rows, dh.view());
  routing.run(da.view(), da.view(), rows, dweight.as<float>());
  const Numbers after = dh.numbers(), sums = read_floats(dweight.as(), 3 * kEach);
  for (int64_t r = 0; r < 3 * kEach; ++r) {
    const bool has = r < 4 || r >= 2 * kEach;
    const auto at = static_cast<std::ptrdiff_t>(r * 2 * kColumns);
    const bool same = std::equal(before.begin() + at, before.begin() + at + 2 * kColumns, after.begin() + at);
    EXPECT_EQ(same, !has) << "row " << r;
    EXPECT_EQ(sums[static_cast<size_t>(r)] == 77, !has) << "row " << r;
  }
}

TEST(RowGradientErrors, NameTheMember) {
  constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;
  expect_error(kInvalid, "SwigluGradient: num_experts = 0", [] { const SwigluGradient made({0, 8, DType::bf16, {}}); });
  expect_error(kInvalid, "columns = 12", [] { const SwigluGradient made({1, 12, DType::bf16, {}}); });
  expect_error(kInvalid, "swiglu.limit", [] { const SwigluGradient made({1, 8, DType::bf16, {0.F, 1.F, 0.F}}); });
  expect_error(kInvalid, "RoutingGradient: dtype = f32", [] { const RoutingGradient made({1, 8, DType::f32}); });
  const Ranges ranges({2}, 0);
  const Memory h(2, 16, false, 1, 1.F), da(2, 8, false, 2, 1.F);
  SwigluGradient swiglu({1, 8, DType::bf16, {}});
  RoutingGradient routing({1, 8, DType::bf16});
  expect_error(kInvalid, "h has 8 columns", [&] { swiglu.run(da.view(), da.view(), ranges.rows, h.view()); });
  expect_error(kInvalid, "dh has 8 columns", [&] { swiglu.run(h.view(), da.view(), ranges.rows, da.view()); });
  expect_error(kInvalid, "a has 16 columns", [&] { swiglu.run(h.view(), da.view(), ranges.rows, h.view(), h.view()); });
  expect_error(kInvalid, "rows: give", [&] { swiglu.run(h.view(), da.view(), {}, h.view()); });
  expect_error(kInvalid, "dweight is null", [&] { routing.run(da.view(), da.view(), ranges.rows, nullptr); });
  expect_error(kInvalid, "num_sms = -1", [&] { swiglu.run(h.view(), da.view(), ranges.rows, h.view(), {}, {nullptr, -1}); });
}

}  // namespace
}  // namespace gemm_test

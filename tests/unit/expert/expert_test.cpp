// SPDX-License-Identifier: Apache-2.0
// ExpertMlp compared with a naive float64 reference, and its contracts: which memory is written, the order of the weighted sum,
// errors, and memory use.
#include "switchyard/expert.hpp"

#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gemm_testing.hpp"

namespace switchyard {
namespace {

using testing::expect_success_with;
using testing::nearest_bf16;
using testing::normal_bf16;
using testing::value_of;

constexpr uint16_t kCanary = 0xABCD;
constexpr WeightStorage kStorages[] = {WeightStorage::packed, WeightStorage::view};

/// One rank's experts with random weights of typical scale.
struct Model {
  ExpertShape shape;
  std::vector<uint16_t> w13, w2;

  Model(int64_t hidden, int64_t intermediate, int experts, uint32_t seed = 1) : shape{hidden, intermediate, experts} {
    const auto size = static_cast<size_t>(experts * hidden * intermediate);
    w13 = normal_bf16(2 * size, 1.0 / std::sqrt(static_cast<double>(hidden)), seed);
    w2 = normal_bf16(size, 1.0 / std::sqrt(static_cast<double>(intermediate)), seed + 1);
  }
  ExpertMlp mlp(const ExpertOptions& options = {}) const { return {shape, w13.data(), w2.data(), options}; }
};

double dot(const uint16_t* a, const uint16_t* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += value_of(a[i]) * value_of(b[i]);
  return sum;
}

/// float64 throughout, except for the rounding of the intermediate row that the contract requires.
std::vector<double> reference_row(const Model& model, int64_t expert, const uint16_t* x) {
  const int64_t h = model.shape.hidden, width = model.shape.intermediate;
  const uint16_t* w13 = model.w13.data() + expert * 2 * width * h;
  const uint16_t* w2 = model.w2.data() + expert * h * width;
  std::vector<uint16_t> act(static_cast<size_t>(width));
  for (int64_t i = 0; i < width; ++i) {
    const double gate = dot(w13 + i * h, x, h), up = dot(w13 + (width + i) * h, x, h);
    act[static_cast<size_t>(i)] = nearest_bf16(gate / (1.0 + std::exp(-gate)) * up);
  }
  std::vector<double> y(static_cast<size_t>(h));
  for (int64_t i = 0; i < h; ++i) y[static_cast<size_t>(i)] = dot(w2 + i * width, act.data(), width);
  return y;
}

/// Accumulates the deviation of results from a reference: the overall relative error (Euclidean norms) and the worst element.
/// An element may deviate by 1 % of its value plus 1 % of the output's root mean square: twice the bf16 rounding of the output,
/// plus an allowance for intermediate elements that round to the other side of a tie.
class Comparison {
 public:
  void add(const uint16_t* got, const std::vector<double>& exact) {
    for (size_t i = 0; i < exact.size(); ++i) {
      got_.push_back(value_of(got[i]));
      exact_.push_back(exact[i]);
    }
  }
  void expect_close() const {
    if (exact_.empty()) return;
    double error = 0, norm = 0;
    for (size_t i = 0; i < exact_.size(); ++i) {
      error += (got_[i] - exact_[i]) * (got_[i] - exact_[i]);
      norm += exact_[i] * exact_[i];
    }
    EXPECT_LE(std::sqrt(error), 5e-3 * std::sqrt(norm));  // half of the contract's 1e-2, to reveal a loss
    const double rms = std::sqrt(norm / static_cast<double>(exact_.size()));
    for (size_t i = 0; i < exact_.size(); ++i) {
      ASSERT_LE(std::abs(got_[i] - exact_[i]), 0.01 * (std::abs(exact_[i]) + rms))
          << "element " << i << " of " << exact_.size();
    }
  }

 private:
  std::vector<double> got_, exact_;
};

/// Checks experts with the given row counts, each preceded by `gap` unused rows (NaN in x).
void check_forward(const Model& model, const std::vector<int64_t>& counts, int64_t gap, const ExpertOptions& options) {
  const int64_t h = model.shape.hidden;
  std::vector<int64_t> first;
  int64_t rows = 0;
  for (const int64_t count : counts) {
    first.push_back(rows + gap);
    rows += gap + count;
  }
  rows += gap;
  std::vector<uint16_t> x(static_cast<size_t>(rows * h), 0x7FC0), y(x.size(), kCanary);
  const std::vector<uint16_t> data = normal_bf16(x.size(), 1.0, 7);
  for (size_t e = 0; e < counts.size(); ++e) {
    std::copy_n(data.begin() + first[e] * h, counts[e] * h, x.begin() + first[e] * h);
  }
  const std::vector<uint16_t> x_before = x;
  ExpertMlp mlp = model.mlp(options);
  SCOPED_TRACE(mlp.implementation() + ", H " + std::to_string(h) + ", I " + std::to_string(model.shape.intermediate));
  mlp.forward(x.data(), first, counts, y.data());
  EXPECT_EQ(x, x_before);

  Comparison comparison;
  std::vector<uint8_t> used(static_cast<size_t>(rows), 0);
  for (size_t e = 0; e < counts.size(); ++e) {
    for (int64_t row = first[e]; row < first[e] + counts[e]; ++row) {
      used[static_cast<size_t>(row)] = 1;
      comparison.add(y.data() + row * h, reference_row(model, static_cast<int64_t>(e), x.data() + row * h));
    }
  }
  ASSERT_NO_FATAL_FAILURE(comparison.expect_close());
  for (int64_t i = 0; i < rows * h; ++i) {
    if (used[static_cast<size_t>(i / h)] != 0) continue;
    ASSERT_EQ(y[static_cast<size_t>(i)], kCanary) << "row " << i / h << " was touched";
  }
  std::vector<uint16_t> again(y.size(), kCanary);
  mlp.forward(x.data(), first, counts, again.data());
  EXPECT_EQ(again, y) << "the same call gave other bits";
}

struct Width {
  int64_t hidden, intermediate;
};
constexpr Width kWidths[] = {{64, 32}, {128, 96}, {100, 70}, {33, 129}, {1, 1}, {7, 5}, {24, 200}};

void check_all_forward_shapes() {
  for (const WeightStorage storage : kStorages) {
    const ExpertOptions options{.storage = storage};
    for (const Width width : kWidths) {
      const Model model(width.hidden, width.intermediate, 5);
      check_forward(model, {0, 1, 17, 0, 64}, 0, options);
      check_forward(model, {3, 0, 2, 33, 5}, 3, options);
      check_forward(model, {0, 0, 0, 0, 0}, 2, options);
    }
    check_forward(Model(96, 64, 2), {300, 257}, 1, options);
    check_forward(Model(64, 48, 1), {700}, 0, options);
  }
}

TEST(ExpertForward, MatchesTheReference) { check_all_forward_shapes(); }

TEST(ExpertForward, ManyExperts) {
  const Model model(48, 40, 70);
  std::vector<int64_t> counts(70);
  for (size_t e = 0; e < counts.size(); ++e) counts[e] = static_cast<int64_t>(e * 7 % 11);
  check_forward(model, counts, 1, {});
}

TEST(ExpertForward, ExpertsInAnyOrderOfRows) {
  const Model model(32, 16, 3);
  ExpertMlp mlp = model.mlp();
  const std::vector<uint16_t> x = normal_bf16(6 * 32, 1.0, 3);
  std::vector<uint16_t> y(x.size());
  mlp.forward(x.data(), std::vector<int64_t>{4, 0, 2}, std::vector<int64_t>{2, 2, 2}, y.data());
  Comparison comparison;
  const int expert_of_row[] = {1, 1, 2, 2, 0, 0};
  for (int row = 0; row < 6; ++row)
    comparison.add(y.data() + row * 32, reference_row(model, expert_of_row[row], x.data() + row * 32));
  comparison.expect_close();
}

// Tests gate values across the whole range, each in its own column. Swapped gate and up rows would be detected.
TEST(ExpertForward, ExtremeGates) {
  constexpr int64_t kH = 32, kI = 32;
  Model model(kH, kI, 1);
  std::fill(model.w13.begin(), model.w13.end(), uint16_t{0});
  std::fill(model.w2.begin(), model.w2.end(), uint16_t{0});
  for (int64_t i = 0; i < kI; ++i) {
    model.w13[static_cast<size_t>(i * kH + i)] = nearest_bf16(1.0);              // gate_i = x_i
    model.w13[static_cast<size_t>((kI + i) * kH + kH - 1)] = nearest_bf16(1.0);  // up_i = x_(H-1)
    model.w2[static_cast<size_t>(i * kI + i)] = nearest_bf16(1.0);               // y_i = act_i
  }
  std::vector<uint16_t> x(kH), y(kH);
  const double gates[] = {-3e38, -1e30, -1000, -104, -90, -88, -20, -5,   -1.25, -1,  -1e-20,
                          0,     1e-20, 1,     5,    20,  88,  104, 1000, 1e30,  3e38};
  for (size_t i = 0; i < std::size(gates); ++i) x[i] = nearest_bf16(gates[i]);
  x[kH - 1] = nearest_bf16(0.5);
  ExpertMlp mlp = model.mlp();
  mlp.forward(x.data(), std::vector<int64_t>{0}, std::vector<int64_t>{1}, y.data());
  for (int64_t i = 0; i < kH; ++i) {
    const double gate = value_of(x[static_cast<size_t>(i)]), exact = gate / (1.0 + std::exp(-gate)) * 0.5;
    // Below 2^-126, kernels may flush to zero.
    ASSERT_NEAR(value_of(y[static_cast<size_t>(i)]), exact, std::abs(exact) * 0.0040 + 1.2e-38) << "gate " << gate;
  }
}

struct RankMajorCase {
  std::vector<int64_t> ids;
  std::vector<float> weights;
  int64_t rows;
  int topk;
};

/// Random local ids: about half of them are not local experts, and some occur twice in a row.
RankMajorCase rank_major_case(int64_t rows, int topk, int experts, uint32_t seed) {
  std::mt19937 random(seed);
  RankMajorCase out{{}, {}, rows, topk};
  for (int64_t i = 0; i < rows * topk; ++i) {
    const int64_t bad[] = {-1, experts, experts + 1000, std::numeric_limits<int64_t>::min(),
                           std::numeric_limits<int64_t>::max()};
    const bool valid = random() % 2 == 0 && i / topk % 9 != 4;  // rows 4, 13, ... have no expert at all
    out.ids.push_back(valid ? static_cast<int64_t>(random() % static_cast<uint32_t>(experts)) : bad[random() % 5]);
    out.weights.push_back(static_cast<float>(random() % 1000) / 997.0f - 0.25f);
  }
  return out;
}

std::vector<double> reference_sum(const Model& model, const RankMajorCase& c, bool weighted, int64_t row, const uint16_t* x) {
  std::vector<double> sum(static_cast<size_t>(model.shape.hidden), 0.0);
  for (int k = 0; k < c.topk; ++k) {
    const auto at = static_cast<size_t>(row * c.topk + k);
    if (c.ids[at] < 0 || c.ids[at] >= model.shape.num_local_experts) continue;
    const std::vector<double> one = reference_row(model, c.ids[at], x + row * model.shape.hidden);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += (weighted ? static_cast<double>(c.weights[at]) : 1.0) * one[i];
  }
  return sum;
}

void check_rank_major(const Model& model, const RankMajorCase& c, const ExpertOptions& options, bool weighted) {
  const int64_t h = model.shape.hidden;
  const std::vector<uint16_t> x = normal_bf16(static_cast<size_t>(c.rows * h), 1.0, 5);
  std::vector<uint16_t> y(x.size() + 8, kCanary);
  ExpertMlp mlp = model.mlp(options);
  SCOPED_TRACE(mlp.implementation() + ", rows " + std::to_string(c.rows) + ", K " + std::to_string(c.topk));
  mlp.forward_rank_major(x.data(), ExpertIds::of(c.ids.data(), c.rows, c.topk), weighted ? c.weights.data() : nullptr,
                         y.data());
  Comparison comparison;
  for (int64_t row = 0; row < c.rows; ++row) {
    comparison.add(y.data() + row * h, reference_sum(model, c, weighted, row, x.data()));
    if (row % 9 != 4) continue;
    for (int64_t i = 0; i < h; ++i) ASSERT_EQ(y[static_cast<size_t>(row * h + i)], 0x0000) << "row " << row << " has no expert";
  }
  ASSERT_NO_FATAL_FAILURE(comparison.expect_close());
  for (size_t i = x.size(); i < y.size(); ++i) ASSERT_EQ(y[i], kCanary);

  // int32 ids have the same meaning (an id that does not fit into int32 becomes another id without an expert).
  std::vector<int32_t> narrow;
  for (const int64_t id : c.ids) narrow.push_back(id == static_cast<int32_t>(id) ? static_cast<int32_t>(id) : -7);
  std::vector<uint16_t> y32(y.size(), kCanary);
  mlp.forward_rank_major(x.data(), ExpertIds::of(narrow.data(), c.rows, c.topk), weighted ? c.weights.data() : nullptr,
                         y32.data());
  EXPECT_EQ(y32, y);
}

void check_all_rank_major() {
  for (const WeightStorage storage : kStorages) {
    for (const bool weighted : {true, false}) {
      const ExpertOptions options{.storage = storage};
      check_rank_major(Model(64, 32, 4), rank_major_case(40, 6, 4, 1), options, weighted);
      check_rank_major(Model(33, 70, 3), rank_major_case(25, 1, 3, 2), options, weighted);
      check_rank_major(Model(40, 24, 9), rank_major_case(12, 32, 9, 3), options, weighted);
      check_rank_major(Model(40, 24, 1), rank_major_case(1, 3, 1, 4), options, weighted);
    }
  }
}

TEST(ExpertRankMajor, MatchesTheReference) { check_all_rank_major(); }

// Processes 256 routes at a time, however little scratch was requested; many blocks produce the same results as one block.
TEST(ExpertRankMajor, BlocksOfRows) {
  const Model model(24, 16, 5);
  const RankMajorCase c = rank_major_case(400, 32, 5, 9);
  check_rank_major(model, c, {.route_scratch_bytes = 0}, true);
  check_rank_major(model, c, {.route_scratch_bytes = 300 * 24 * 4}, true);
  check_rank_major(model, c, {}, true);
}

// Outputs of 2^24, 1 and -2^24 distinguish all orders of a float32 sum: only ascending k gives the expected bits.
TEST(ExpertRankMajor, SumsInOrderOfK) {
  const ExpertShape shape{1, 1, 3};
  // silu(32) = 32 in float32 and up = 1, so y = 32 * w2.
  const uint16_t gate = nearest_bf16(32), one = nearest_bf16(1);
  const std::vector<uint16_t> w13{gate, one, gate, one, gate, one};
  const std::vector<uint16_t> w2{nearest_bf16(0x1p19), nearest_bf16(0x1p-5), nearest_bf16(-0x1p19)};
  ExpertMlp mlp(shape, w13.data(), w2.data());
  struct {
    int32_t ids[3];
    double sum;
  } const cases[] = {{{0, 1, 2}, 0}, {{0, 2, 1}, 1}, {{1, 0, 2}, 0}, {{1, 2, 0}, 1}, {{2, 0, 1}, 1}, {{2, 1, 0}, 1}};
  for (const auto& c : cases) {
    float expected = 0;
    for (const int32_t id : c.ids) expected += id == 0 ? 0x1p24f : id == 1 ? 1.0f : -0x1p24f;
    uint16_t y = kCanary;
    mlp.forward_rank_major(&one, ExpertIds::of(c.ids, 1, 3), nullptr, &y);
    EXPECT_EQ(value_of(y), static_cast<double>(expected)) << c.ids[0] << c.ids[1] << c.ids[2];
    EXPECT_EQ(static_cast<double>(expected), c.sum);
  }
}

// Neither an expert's output nor its product with a weight is rounded to bf16; that would turn 1 + 2^-10 and 1 + 2^-16 into 1.
TEST(ExpertRankMajor, SummandsKeepFloat32) {
  const uint16_t gate = nearest_bf16(32), one = nearest_bf16(1);
  const std::vector<uint16_t> w13{gate, gate, one, one, gate, gate, one, one};
  const std::vector<uint16_t> w2{nearest_bf16(0x1p-5), nearest_bf16(0x1p-15), nearest_bf16(-0x1p-5), 0};
  ExpertMlp mlp({1, 2, 2}, w13.data(), w2.data());  // outputs 1 + 2^-10 and -1
  const auto sum = [&](int32_t id0, float weight0, int32_t id1, float weight1) {
    const int32_t ids[] = {id0, id1};
    const float weights[] = {weight0, weight1};
    uint16_t y = kCanary;
    mlp.forward_rank_major(&one, ExpertIds::of(ids, 1, 2), weights, &y);
    return value_of(y);
  };
  EXPECT_EQ(sum(0, 1.0f, 1, 1.0f), 0x1p-10);
  EXPECT_EQ(sum(1, -1.0f - 0x1p-16f, 1, 1.0f), 0x1p-16);
}

TEST(ExpertRankMajor, NoRowsAndNoExperts) {
  Model model(16, 8, 2);
  ExpertMlp mlp = model.mlp();
  mlp.forward_rank_major(nullptr, ExpertIds::of(static_cast<const int32_t*>(nullptr), 0, 4), nullptr, nullptr);
  mlp.forward(nullptr, std::vector<int64_t>{0, 0}, std::vector<int64_t>{0, 0}, nullptr);

  ExpertMlp empty(ExpertShape{16, 8, 0}, nullptr, nullptr);  // a rank may hold no experts
  empty.forward(nullptr, {}, {}, nullptr);
  const std::vector<uint16_t> x = normal_bf16(3 * 16, 1.0, 1);
  const int32_t ids[] = {0, -1, 5};
  std::vector<uint16_t> y(x.size(), kCanary);
  empty.forward_rank_major(x.data(), ExpertIds::of(ids, 3, 1), nullptr, y.data());
  EXPECT_EQ(y, std::vector<uint16_t>(x.size(), 0));
}

TEST(ExpertMlp, WaysToGiveWeightsAgree) {
  const Model model(72, 56, 3);
  const auto w13_size = static_cast<size_t>(2 * 72 * 56), w2_size = static_cast<size_t>(72 * 56);
  int next = 0;
  ExpertMlp from_source(model.shape, [&](int expert, std::span<uint16_t> w13, std::span<uint16_t> w2) {
    ASSERT_EQ(expert, next++);
    ASSERT_EQ(w13.size(), w13_size);
    ASSERT_EQ(w2.size(), w2_size);
    std::copy_n(model.w13.begin() + expert * static_cast<int64_t>(w13_size), w13_size, w13.begin());
    std::copy_n(model.w2.begin() + expert * static_cast<int64_t>(w2_size), w2_size, w2.begin());
  });
  EXPECT_EQ(next, 3);
  std::vector<uint16_t> w13 = model.w13, w2 = model.w2;
  ExpertMlp packed(model.shape, w13.data(), w2.data());
  std::fill(w13.begin(), w13.end(), uint16_t{0x7FC0});  // packed: the caller's weights may be discarded
  std::fill(w2.begin(), w2.end(), uint16_t{0x7FC0});

  const std::vector<int64_t> first{0, 20, 21}, counts{20, 1, 30};
  const std::vector<uint16_t> x = normal_bf16(51 * 72, 1.0, 2);
  std::vector<uint16_t> y1(x.size()), y2(x.size());
  from_source.forward(x.data(), first, counts, y1.data());
  packed.forward(x.data(), first, counts, y2.data());
  EXPECT_EQ(y1, y2);
  ExpertMlp moved = std::move(packed);
  packed = std::move(from_source);
  moved.forward(x.data(), first, counts, y1.data());
  EXPECT_EQ(y1, y2);
  packed.forward(x.data(), first, counts, y1.data());
  EXPECT_EQ(y1, y2);
}

TEST(ExpertMlp, ViewSeesTheCallersWeights) {
  Model model(32, 16, 1);
  ExpertMlp mlp = model.mlp({.storage = WeightStorage::view});
  const std::vector<uint16_t> x = normal_bf16(4 * 32, 1.0, 2);
  std::vector<uint16_t> y(x.size(), kCanary);
  std::fill(model.w2.begin(), model.w2.end(), uint16_t{0});
  mlp.forward(x.data(), std::vector<int64_t>{0}, std::vector<int64_t>{4}, y.data());
  for (const uint16_t bits : y) ASSERT_EQ(value_of(bits), 0.0);
}

TEST(ExpertMlp, MemoryRequired) {
  for (const WeightStorage storage : kStorages) {
    const Model model(96, 64, 4);
    const ExpertOptions options{.storage = storage, .route_scratch_bytes = 1 << 20};
    const ExpertMemory asked = ExpertMlp::memory_required(model.shape, options);
    const ExpertMemory taken = model.mlp(options).memory();
    EXPECT_EQ(asked.weight_bytes, taken.weight_bytes);
    EXPECT_EQ(asked.scratch_bytes, taken.scratch_bytes);
    EXPECT_EQ(asked.total(), asked.weight_bytes + asked.scratch_bytes);
    if (storage == WeightStorage::view) {
      EXPECT_EQ(asked.weight_bytes, 0u);
    } else {
      EXPECT_GE(asked.weight_bytes, (model.w13.size() + model.w2.size()) * 2);
    }
    EXPECT_GE(asked.scratch_bytes, size_t{1} << 20);
    EXPECT_GE(ExpertMlp::memory_required(model.shape, {.storage = storage, .route_scratch_bytes = 3 << 20}).scratch_bytes,
              asked.scratch_bytes + (size_t{2} << 20) - 96 * 4);
  }
}

/// Returns the text of the Error thrown by `call`.
template <class Call>
std::string error_text(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "no error";
}

TEST(ExpertMlp, ErrorsNameTheArgument) {
  const Model model(16, 8, 2);
  ExpertMlp mlp = model.mlp();
  std::vector<uint16_t> x(64), y(64, kCanary);
  const auto text = [](auto&& call) { return error_text(call); };
  const auto make = [&](ExpertShape shape, ExpertOptions options = {}) {
    return error_text([&] { ExpertMlp(shape, model.w13.data(), model.w2.data(), options); });
  };
  const auto has = [](const std::string& whole, const std::string& part) {
    EXPECT_NE(whole.find(part), std::string::npos) << "'" << whole << "' should contain '" << part << "'";
  };
  has(make({0, 8, 2}), "shape.hidden is 0; allowed: 1 to");
  has(make({16, -1, 2}), "shape.intermediate is -1; allowed: 1 to");
  has(make({16, int64_t{1} << 40, 2}), "shape.intermediate is 1099511627776");
  has(make({16, 8, -1}), "shape.num_local_experts is -1; allowed: 0 to");
  has(make({1 << 24, 1 << 24, 1 << 30}), "shape.num_local_experts is 1073741824; allowed: 0 to 2048");
  has(make({16, 8, 2}, {.storage = static_cast<WeightStorage>(9)}), "options.storage is 9");
  has(make({16, 8, 2}, {.route_scratch_bytes = SIZE_MAX}), "options.route_scratch_bytes is");
  has(text([&] { ExpertMlp(model.shape, nullptr, model.w2.data()); }), "w13 is null");
  has(text([&] { ExpertMlp(model.shape, model.w13.data(), nullptr); }), "w2 is null");
  has(text([&] { ExpertMlp(model.shape, ExpertMlp::Source()); }), "source is empty");
  has(text([&] { ExpertMlp(model.shape, [](int, auto, auto) {}, {.storage = WeightStorage::view}); }),
      "options.storage is view");

  const std::vector<int64_t> zero{0, 0}, one{1, 1};
  const auto forward = [&](auto first, auto counts) {
    return error_text([&] { mlp.forward(x.data(), first, counts, y.data()); });
  };
  has(forward(std::vector<int64_t>{0}, zero), "first_row and num_rows have 1 and 2 entries; allowed: one per local expert, 2");
  has(forward(zero, std::vector<int64_t>{0, 0, 0}), "have 2 and 3 entries");
  has(forward(zero, std::vector<int64_t>{1, -3}), "local expert 1 has first_row 0 and num_rows -3");
  has(forward(std::vector<int64_t>{-1, 0}, one), "local expert 0 has first_row -1 and num_rows 1");
  has(text([&] { mlp.forward(nullptr, zero, one, y.data()); }), "x or y is null");
  has(text([&] { mlp.forward(x.data(), zero, one, nullptr); }), "x or y is null");

  const int32_t ids[33] = {};
  const auto rank_major = [&](ExpertIds view) {
    return error_text([&] { mlp.forward_rank_major(x.data(), view, nullptr, y.data()); });
  };
  has(rank_major({ids, -1, 1, false}), "topk_ids.num_tokens is -1; allowed: >= 0");
  has(rank_major({ids, 1, 0, false}), "topk_ids.topk is 0; allowed: 1 to 32");
  has(rank_major({ids, 1, 33, false}), "topk_ids.topk is 33; allowed: 1 to 32");
  has(rank_major({nullptr, 1, 1, false}), "topk_ids.data, x or y is null");
  EXPECT_EQ(y, std::vector<uint16_t>(64, kCanary)) << "a refused call wrote something";
}

// With ranks as threads, four concurrent objects produce the same bits as a single one.
TEST(ExpertMlp, ObjectsOfConcurrentThreads) {
  const Model model(128, 80, 3);
  const std::vector<int64_t> first{0, 70, 71}, counts{70, 1, 40};
  const std::vector<uint16_t> x = normal_bf16(111 * 128, 1.0, 4);
  const RankMajorCase c = rank_major_case(111, 4, 3, 6);
  for (const WeightStorage storage : kStorages) {
    std::vector<uint16_t> alone(x.size()), alone_sum(x.size());
    ExpertMlp mlp = model.mlp({.storage = storage});
    mlp.forward(x.data(), first, counts, alone.data());
    mlp.forward_rank_major(x.data(), ExpertIds::of(c.ids.data(), c.rows, c.topk), c.weights.data(), alone_sum.data());
    constexpr int kThreads = 4;
    std::barrier start(kThreads);
    std::vector<int> wrong(kThreads, 0);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        start.arrive_and_wait();
        ExpertMlp own = model.mlp({.storage = storage});
        for (int repeat = 0; repeat < 3; ++repeat) {
          std::vector<uint16_t> y(x.size()), sum(x.size());
          own.forward(x.data(), first, counts, y.data());
          own.forward_rank_major(x.data(), ExpertIds::of(c.ids.data(), c.rows, c.topk), c.weights.data(), sum.data());
          wrong[static_cast<size_t>(t)] += (y != alone) + (sum != alone_sum);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, std::vector<int>(kThreads, 0));
  }
}

class ExpertIsa : public ::testing::TestWithParam<const char*> {};
TEST_P(ExpertIsa, MatchesTheReference) {
  expect_success_with({{"DNNL_MAX_CPU_ISA", GetParam()}, {"ONEDNN_MAX_CPU_ISA", GetParam()}}, [] {
    EXPECT_EQ(Model(64, 64, 1).mlp().implementation().substr(0, 4), "f32 ");
    check_all_forward_shapes();
    check_all_rank_major();
  });
}
INSTANTIATE_TEST_SUITE_P(Isa, ExpertIsa, ::testing::Values("AVX2", "AVX512_CORE"));

}  // namespace
}  // namespace switchyard

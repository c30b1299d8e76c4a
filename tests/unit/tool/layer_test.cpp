// SPDX-License-Identifier: Apache-2.0
// The tool's layer: weights that a GPU generates from a closed form, and a check that detects errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "oracle/numbers.hpp"
#include "oracle/rows.hpp"
#include "tools/cli/verb.hpp"
#include "tools/layer/fp8_operands.hpp"
#include "tools/layer/layer_rank.hpp"
#include "tools/layer/moe_reference.hpp"
#include "tools/run/ranks.hpp"
#include "unit/tool/small_layer.hpp"

namespace switchyard::tool {
namespace {

/// Computes one element of [rows, cols] as the kernel does.
uint16_t element(const measure::WeightForm& form, int64_t expert, int64_t row, int64_t col) {
  const uint64_t bytes = measure::weight_bytes(measure::weight_row_key(form.key, expert, row), col / 8);
  return form.levels[bytes >> (col % 8 * 8) & 0xFF];
}

TEST(LayerWeights, TheFormOfTheKernelIsThatOfExpertWeights) {
  for (const uint64_t seed : {uint64_t{1}, uint64_t{77}}) {
    const int64_t hidden = 264, intermediate = 40;
    const ExpertWeights weights(seed, hidden, intermediate);
    const WeightForms forms = weight_forms(seed, hidden, intermediate);
    for (const int64_t expert : {0, 5, 200}) {
      for (int64_t row = 0; row < 2 * intermediate; row += 7)
        for (int64_t col = 0; col < hidden; ++col)
          ASSERT_EQ(element(forms.gate_up, expert, row, col), weights.w13(expert, row, col))
              << expert << " " << row << " " << col;
      for (int64_t row = 0; row < hidden; row += 13)
        for (int64_t col = 0; col < intermediate; ++col)
          ASSERT_EQ(element(forms.down, expert, row, col), weights.w2(expert, row, col)) << expert << " " << row << " " << col;
    }
  }
}

TEST(LayerWeights, ThoseOfFp8AreNearAndTheirScalesVary) {
  const int64_t hidden = 272, intermediate = 144;
  const ExpertWeights weights(3, hidden, intermediate);
  const measure::Fp8WeightForm form = fp8_weight_forms(3, hidden, intermediate).gate_up;
  const measure::Fp8WeightSize size{4, 2 * intermediate, hidden, intermediate};
  EXPECT_EQ(size.block_rows(), 4) << "gate and up begin a block each";
  EXPECT_EQ(size.block_cols(), 3);
  std::vector<int> used(measure::Fp8WeightForm::kScales);
  for (int64_t expert = 0; expert < 8; ++expert)
    for (int64_t row = 0; row < 2 * intermediate; row += 16)
      for (int64_t col = 0; col < hidden; ++col) {
        const int64_t block = row < intermediate ? row / 128 : 2 + (row - intermediate) / 128;
        ASSERT_EQ(measure::weight_block_row(row, intermediate), block);
        const int scale = measure::weight_scale_of(expert, block, col / 128);
        ++used[static_cast<size_t>(scale)];
        const uint64_t bytes = measure::weight_bytes(measure::weight_row_key(form.key, expert, row), col / 8);
        const uint8_t code = form.codes[scale][bytes >> (col % 8 * 8) & 0xFF];
        const float value = oracle::load(DType::fp8_e4m3, &code, 0) * form.scales[scale];
        const uint16_t bf16 = weights.w13(expert, row, col);
        const float wanted = oracle::load(DType::bf16, &bf16, 0);
        ASSERT_LE(std::fabs(value - wanted), std::fabs(wanted) / 16 + form.scales[scale] / 512) << expert << row << col;
      }
  EXPECT_TRUE(std::all_of(used.begin(), used.end(), [](int n) { return n > 0; }));
  const measure::Fp8WeightSize rows{4, 2 * intermediate, hidden, intermediate, true};
  EXPECT_EQ(rows.scales(), 2 * intermediate) << "a scale for each output";
  EXPECT_EQ(rows.block_row(intermediate + 1), intermediate + 1);
  EXPECT_EQ(rows.block_col(hidden - 1), 0);
  for (int s = 1; s < measure::Fp8WeightForm::kScales; ++s) EXPECT_GT(form.scales[s], 1.1f * form.scales[s - 1]);
}

/// An fp8 layer for one token without an exchange, computed in double directly from the definitions.
class PlainFp8Layer {
 public:
  PlainFp8Layer(int64_t hidden, int64_t intermediate, const LayerArithmetic& numbers)
      : hidden_(hidden),
        intermediate_(intermediate),
        numbers_(numbers),
        channels_(numbers.scaling != ScaleGranularity::block),
        weights_(9, hidden, intermediate) {}

  std::vector<double> run(int64_t expert, const uint16_t* x) const {
    const bool one_scale = numbers_.scaling == ScaleGranularity::per_channel;
    const std::vector<double> in = dequantised(x, hidden_, numbers_.quantize, one_scale ? hidden_ : 128);
    std::vector<uint16_t> between(static_cast<size_t>(intermediate_));
    for (int64_t j = 0; j < intermediate_; ++j) {
      const double gate = up_sum(expert, j, in), up = up_sum(expert, intermediate_ + j, in);
      oracle::store(DType::bf16, between.data(), j, static_cast<float>(gate / (1 + std::exp(-gate)) * up));
    }
    const std::vector<double> h = dequantised_between(between.data());
    std::vector<double> out(static_cast<size_t>(hidden_));
    for (int64_t c = 0; c < hidden_; ++c)
      for (int64_t j = 0; j < intermediate_; ++j)
        out[static_cast<size_t>(c)] +=
            h[static_cast<size_t>(j)] *
            weight(weights_.w2(expert, c, j), 0.3557 * static_cast<double>(intermediate_),
                   channels_ ? measure::weight_scale_of(expert, c, 0) : measure::weight_scale_of(expert, c / 128, j / 128));
    return out;
  }

 private:
  double up_sum(int64_t expert, int64_t row, const std::vector<double>& in) const {
    const int64_t blocks = (intermediate_ + 127) / 128;
    const int64_t block = row < intermediate_ ? row / 128 : blocks + (row - intermediate_) / 128;
    double sum = 0;
    for (int64_t c = 0; c < hidden_; ++c)
      sum += in[static_cast<size_t>(c)] *
             weight(weights_.w13(expert, row, c), static_cast<double>(hidden_),
                    channels_ ? measure::weight_scale_of(expert, row, 0) : measure::weight_scale_of(expert, block, c / 128));
    return sum;
  }
  std::vector<double> dequantised_between(const uint16_t* row) const {
    if (numbers_.intermediate_scaling != OutputScaling::fixed)
      return dequantised(row, intermediate_, ScaleKind::f32,
                         numbers_.intermediate_scaling == OutputScaling::per_row ? intermediate_ : 128);
    std::vector<double> values;
    for (int64_t j = 0; j < intermediate_; ++j) {
      const float scaled = oracle::load(DType::bf16, row, j) * (1 / 0.07f);
      values.push_back(oracle::rounded(DType::fp8_e4m3, std::clamp(scaled, -448.0f, 448.0f)) * static_cast<double>(0.07f));
    }
    return values;
  }
  /// The largest bf16 weight is sqrt(3 / terms).
  static double weight(uint16_t bf16, double terms, int choice) {
    const float largest = oracle::rounded(DType::bf16, static_cast<float>(std::sqrt(3 / terms)));
    const float scale = largest / 448.0f * (1 + static_cast<float>(choice) / 4);
    return oracle::rounded(DType::fp8_e4m3, oracle::load(DType::bf16, &bf16, 0) / scale) * static_cast<double>(scale);
  }
  static std::vector<double> dequantised(const uint16_t* row, int64_t cols, ScaleKind kind, int64_t group) {
    const auto per_scale = static_cast<int>(group);
    std::vector<uint8_t> codes(static_cast<size_t>(cols)), scales(scale_row_bytes(cols, kind, per_scale));
    oracle::quantise(DType::bf16, row, cols, kind, codes.data(), scales.data(), per_scale);
    std::vector<double> values;
    for (int64_t c = 0; c < cols; ++c)
      values.push_back(static_cast<double>(oracle::load(DType::fp8_e4m3, codes.data(), c)) *
                       static_cast<double>(oracle::scale_value(kind, scales.data(), c / group)));
    return values;
  }

  int64_t hidden_, intermediate_;
  LayerArithmetic numbers_;
  bool channels_;  ///< each output has a weight scale
  ExpertWeights weights_;
};

std::vector<LayerArithmetic> fp8_arithmetics() {
  std::vector<LayerArithmetic> all{{ScaleKind::f32}, {ScaleKind::ue8m0}};
  for (const auto scaling : {ScaleGranularity::per_channel, ScaleGranularity::group_channel})
    for (const auto between : {OutputScaling::per_group, OutputScaling::fixed, OutputScaling::per_row})
      all.push_back({ScaleKind::f32, Accumulate::exact, scaling, between});
  return all;
}
std::string text_of(const LayerArithmetic& numbers) {
  return std::string(to_string(numbers.quantize)) + " " + to_string(numbers.scaling) + " " +
         to_string(numbers.intermediate_scaling);
}

TEST(MoeReference, OfFp8HasQuantisedOperands) {
  const int64_t hidden = 272, intermediate = 176;
  const RowArray x = token_rows(5, 0, 0, 2, hidden, DType::bf16, ScaleKind::none);
  ReferenceInput input;
  input.rows = {reinterpret_cast<const uint16_t*>(x.row(0))};
  input.routing = {{3, 2, 2, {1, 2, 2, -1}, {0.5f, 2, 1, 1}}};
  const ExpertWeights weights(9, hidden, intermediate);
  const auto plain = moe_reference(input, weights, hidden, intermediate, 1, {});
  for (const LayerArithmetic& numbers : fp8_arithmetics()) {
    input.arithmetic = numbers;
    std::vector<std::vector<double>> ambiguity;
    const auto got = moe_reference(input, weights, hidden, intermediate, 2, {}, &ambiguity);
    const PlainFp8Layer layer(hidden, intermediate, numbers);
    const auto* const rows = reinterpret_cast<const uint16_t*>(x.row(0));
    const std::vector<double> first = layer.run(1, rows), second = layer.run(2, rows), other = layer.run(2, rows + hidden);
    double off[2] = {}, norm[2] = {}, from_plain[2] = {};
    for (size_t c = 0; c < static_cast<size_t>(hidden); ++c)
      for (size_t t = 0; t < 2; ++t) {
        const double wanted = t == 0 ? 0.5 * first[c] + 2 * second[c] : other[c];
        const size_t at = t * static_cast<size_t>(hidden) + c;
        off[t] += std::pow(static_cast<double>(got[0][at]) - wanted, 2);
        from_plain[t] += std::pow(static_cast<double>(plain[0][at]) - wanted, 2);
        norm[t] += wanted * wanted;
      }
    for (size_t t = 0; t < 2; ++t) {
      EXPECT_LT(std::sqrt(off[t] / norm[t]), 1e-4) << text_of(numbers) << t;
      EXPECT_GT(std::sqrt(from_plain[t] / norm[t]), 2e-2) << "a layer in bf16 would not pass";
      EXPECT_GE(layer_tolerance(input, hidden, intermediate, std::sqrt(norm[t]), ambiguity[0][t]), kFp8LayerTolerance);
      EXPECT_LT(ambiguity[0][t] / std::sqrt(norm[t]), numbers.scaling == ScaleGranularity::block ? 0.05 : 0.2);
    }
  }
}

TEST(MoeReference, KnowsElementsNearABoundary) {
  const float row[] = {448, -17, 16, 18}, still[] = {0, 0, 0, 0}, moving[] = {0.1f, 0.1f, 0.1f, 0.1f};
  float range[4];
  quantised_range(row, still, 4, {}, range);
  EXPECT_EQ(*std::max_element(range, range + 4), 0);
  quantised_range(row, moving, 4, {}, range);
  EXPECT_EQ(range[1], 2) << "16 or 18";
  EXPECT_EQ(range[0] + range[2] + range[3], 0);
  quantised_range(row, moving, 4, {.fixed = 0.5f}, range);
  EXPECT_EQ(range[1], 2) << "32 or 36 times 0.5";
  EXPECT_EQ(range[0] + range[2] + range[3], 0) << "448 saturates, at 224";
  ReferenceInput input;
  EXPECT_EQ(layer_tolerance(input, 7168, 64, 4, 0), kLayerTolerance);
  input.arithmetic.quantize = ScaleKind::f32;
  EXPECT_EQ(layer_tolerance(input, 7168, 64, 4, 0), kFp8LayerTolerance);
  EXPECT_EQ(layer_tolerance(input, 7168, 64, 4, 1), 0.25 + 1.0 / 256);
  EXPECT_EQ(layer_tolerance(input, 7168, kFewElements, 4, 1), kFp8LayerTolerance);
  input.arithmetic.accumulate = Accumulate::fast;
  EXPECT_NEAR(layer_tolerance(input, 7168, 2048, 4, 1), 0.026, 0.0005);
  const double fast = layer_tolerance(input, 7168, 2048, 4, 1);
  const auto of = [&](ScaleGranularity scaling, OutputScaling between) {
    input.arithmetic = {ScaleKind::f32, Accumulate::exact, scaling, between};
    return layer_tolerance(input, 7168, 2048, 4, 1);
  };
  EXPECT_EQ(of(ScaleGranularity::per_channel, OutputScaling::fixed), fast);
  EXPECT_LT(of(ScaleGranularity::per_channel, OutputScaling::per_group), fast) << "the second product has exact sums";
  EXPECT_EQ(of(ScaleGranularity::group_channel, OutputScaling::per_group), kFp8LayerTolerance);
  EXPECT_NEAR(of(ScaleGranularity::per_channel, OutputScaling::per_row), 0.0415, 0.0005);
  input.arithmetic = {ScaleKind::f32, Accumulate::fast};
  EXPECT_EQ(layer_tolerance(input, 7168, 64, 4, 1), 0.25 + 1.0 / 256);
}

/// A tensor core's sum: the products of 32 elements and the sum so far are truncated to 13 bits below the largest of them.
double truncated_sum(double sum, const double* products) {
  double largest = std::fabs(sum);
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(products[i]));
  if (largest == 0) return 0;
  const double unit = std::exp2(std::floor(std::log2(largest)) - 13);
  double next = std::trunc(sum / unit);
  for (int i = 0; i < 32; ++i) next += std::trunc(products[i] / unit);
  return next * unit;
}
struct BothSums {
  double exact = 0, fast = 0;
};
/// A row's codes, and its scales: one per 128 elements, or one.
struct Quantised {
  Quantised(const void* row, int64_t columns, bool one_scale)
      : x(static_cast<size_t>(columns)), scales(scale_row_bytes(columns, ScaleKind::f32)), one(one_scale) {
    const auto group = static_cast<int>(one ? columns : 128);
    oracle::quantise(DType::bf16, row, columns, ScaleKind::f32, x.data(), scales.data(), group);
  }
  std::vector<uint8_t> x;
  std::vector<std::byte> scales;
  bool one;
};
/// Sums of one output with weights of a bench: in float64, and by a tensor core whose sum is rescaled wherever scales change.
BothSums sums_of(const Quantised& row, const measure::Fp8WeightForm& form, uint64_t output) {
  BothSums sums;
  double unit = 0;
  const std::vector<uint8_t>& x = row.x;
  for (size_t group = 0; group < x.size() / 128; ++group) {
    const size_t at_scale = row.one ? 0 : group, choice = (output * 5 + at_scale * 3) % measure::Fp8WeightForm::kScales;
    const double scale =
        static_cast<double>(oracle::scale_value(ScaleKind::f32, row.scales.data(), static_cast<int64_t>(at_scale))) *
        static_cast<double>(form.scales[choice]);
    if (unit != 0) sums.fast = static_cast<double>(static_cast<float>(sums.fast * (unit / scale)));
    unit = scale;
    for (size_t step = 0; step < 128; step += 32) {
      double products[32];
      for (size_t i = 0; i < 32; ++i) {
        const size_t at = group * 128 + step + i;
        const uint64_t level = measure::mix_weight_key(output * x.size() + at) & 0xFF;
        products[i] = static_cast<double>(oracle::load(DType::fp8_e4m3, x.data(), static_cast<int64_t>(at))) *
                      static_cast<double>(oracle::load(DType::fp8_e4m3, form.codes[choice], static_cast<int64_t>(level)));
        sums.exact += products[i] * scale;
      }
      sums.fast = truncated_sum(sums.fast, products);
    }
  }
  sums.fast *= unit;
  return sums;
}

/// `one_scale`: as with ScaleGranularity::per_channel.
void expect_error_of_sums(bool one_scale) {
  for (const int64_t hidden : {2048, 7168, 16384}) {
    const RowArray row = token_rows(5, 0, 0, 1, hidden, DType::bf16, ScaleKind::none);
    const Quantised x(row.row(0), hidden, one_scale);
    const measure::Fp8WeightForm form = fp8_weight_forms(0, hidden, 2048).gate_up;
    double square = 0, difference = 0;
    for (uint64_t output = 0; output < 300; ++output) {
      const BothSums gate = sums_of(x, form, output), up = sums_of(x, form, 1000 + output);
      const double want = gate.exact / (1 + std::exp(-gate.exact)) * up.exact,
                   got = gate.fast / (1 + std::exp(-gate.fast)) * up.fast;
      square += want * want;
      difference += (got - want) * (got - want);
    }
    const double error = std::sqrt(difference / square);
    EXPECT_LE(error, fast_sum_error(hidden)) << hidden;
    EXPECT_GE(error, fast_sum_error(hidden) / (one_scale ? 3 : 2)) << hidden;
  }
}
TEST(MoeReference, KnowsTheErrorOfFastSums) { expect_error_of_sums(false); }
TEST(MoeReference, KnowsTheErrorOfSumsPerChannel) { expect_error_of_sums(true); }

/// The largest element of a row is off by as much as a sum may be, so that the scale of the row changes.
TEST(MoeReference, KnowsTheErrorOfAScalePerRow) {
  const int64_t columns = 2048;
  const RowArray rows = token_rows(5, 0, 0, 8, columns, DType::bf16, ScaleKind::none);
  ReferenceInput input;
  input.arithmetic = {ScaleKind::f32, Accumulate::exact, ScaleGranularity::per_channel, OutputScaling::per_row};
  const double allowed = layer_tolerance(input, 7168, columns, 1, 0);
  input.arithmetic.intermediate_scaling = OutputScaling::fixed;
  const double without = layer_tolerance(input, 7168, columns, 1, 0);
  for (int64_t r = 0; r < rows.rows(); ++r) {
    std::vector<float> x(static_cast<size_t>(columns));
    quantised(reinterpret_cast<const uint16_t*>(rows.row(r)), columns, {ScaleKind::f32, columns}, x.data());
    double square = 0, difference = 0;
    const float largest =
        std::fabs(*std::max_element(x.begin(), x.end(), [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
    const auto off = static_cast<float>(fast_sum_error(7168)) + 1.0f / 256;
    for (const float value : x) {
      const auto with = [&](float scale) { return oracle::rounded(DType::fp8_e4m3, value / scale) * scale; };
      const double moved = static_cast<double>(with(largest / 448 * (1 + off))) - static_cast<double>(with(largest / 448));
      difference += moved * moved;
      square += static_cast<double>(value) * static_cast<double>(value);
    }
    EXPECT_LE(difference / square, allowed * allowed - without * without) << r;
  }
}

TEST(LayerWidths, OfGpusAreMultiplesOf8AndInFp8Of16) {
  EXPECT_NO_THROW(check_layer_widths(264, 72, ScaleKind::none));
  EXPECT_NO_THROW(check_layer_widths(272, 80, ScaleKind::ue8m0));
  const auto text_of = [](int64_t hidden, int64_t intermediate, ScaleKind quantize) {
    try {
      check_layer_widths(hidden, intermediate, quantize);
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(text_of(264, 12, ScaleKind::none),
            "--intermediate: 12 given; allowed for a layer with --backend cuda: a multiple of 8");
  EXPECT_EQ(text_of(264, 16, ScaleKind::f32),
            "--hidden: 264 given; allowed for a layer with --backend cuda and --quantize f32: a multiple of 16");
}

/// Returns the check results of each rank: for its layer, for the same layer with one wrong element in its last token, and for
/// outputs that were never written.
std::vector<nlohmann::json> checked(const LayerSpec& spec, int64_t max_tokens) {
  RankJob job;
  job.world = spec.scenario.world;
  job.group.heap_bytes = layer_heap_bytes(spec);
  return run_ranks(job, [&](Group& group, RankLink&) {
    const std::shared_ptr<RankDevice> device = rank_device(group.rank(), 0, 0);
    LayerRank rank(spec, group, *device);
    rank.prepare(1);
    const CheckResult unwritten = rank.check("unwritten", rank.outputs(), max_tokens, 1);
    group.barrier();
    rank.layer();
    std::vector<std::byte> out = rank.outputs();
    const CheckResult right = rank.check("right", out, max_tokens, 2);
    const uint16_t large = 0x4120;  // 10
    std::memcpy(out.data() + out.size() - 2, &large, 2);
    const CheckResult wrong = rank.check("wrong", out, max_tokens, 1);
    group.barrier();
    return nlohmann::json{unwritten.passed, right.passed, right.compared, wrong.passed, wrong.detail};
  });
}

TEST(LayerRank, FindsWrongAndUnwrittenOutputs) {
  for (const MoeExchange exchange : {MoeExchange::normal, MoeExchange::low_latency}) {
    const std::vector<nlohmann::json> ranks = checked(small_layer(exchange), 100);
    for (size_t r = 0; r < ranks.size(); ++r) {
      EXPECT_FALSE(ranks[r][0].get<bool>()) << to_string(exchange) << r;
      EXPECT_TRUE(ranks[r][1].get<bool>()) << to_string(exchange) << r;
      EXPECT_EQ(ranks[r][2].get<int>(), r == 0 ? 3 * 64 : 64) << to_string(exchange);
      EXPECT_FALSE(ranks[r][3].get<bool>()) << to_string(exchange) << r;
      EXPECT_EQ(ranks[r][4].get<std::string>().rfind(r == 0 ? "token 2: off by " : "token 0: off by ", 0), 0u) << ranks[r][4];
    }
    EXPECT_EQ(checked(small_layer(exchange), 1)[0][2], 64) << "as many tokens as asked for";
  }
}

}  // namespace
}  // namespace switchyard::tool

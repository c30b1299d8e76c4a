// SPDX-License-Identifier: Apache-2.0
// ExpertMlp with rows in the form delivered by dispatch, on the CPU: truncated ranges, rejected arguments, and a layer whose
// rows are not copied between its calls.
#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gemm_testing.hpp"
#include "switchyard/expert.hpp"
#include "unit/expert/expert_layer.hpp"
#include "unit/expert/host_rig.hpp"

namespace switchyard {
namespace {

using testing::ExpertLayer;
using testing::HostRig;
using testing::LayerCase;
using testing::normal_bf16;

constexpr uint16_t kCanary = 0xABCD;
constexpr int64_t kHidden = 24, kWidth = 16, kRows = 40;

/// Three experts, and rows for them.
struct Small {
  std::vector<uint16_t> w13 = normal_bf16(3 * 2 * kWidth * kHidden, 0.2, 1), w2 = normal_bf16(3 * kHidden * kWidth, 0.25, 2);
  std::vector<uint16_t> x = normal_bf16(kRows * kHidden, 1.0, 3);
  ExpertMlp mlp{{kHidden, kWidth, 3}, w13.data(), w2.data()};
  ConstRows input(int64_t rows = kRows) const { return {x.data(), rows, kHidden, DType::bf16}; }

  /// Returns the content of y after a call that receives `rows` rows of it.
  std::vector<uint16_t> run(const ExpertRows& ranges, int64_t rows = kRows, int64_t x_rows = kRows) {
    std::vector<uint16_t> y(x.size(), kCanary);
    mlp.forward(input(x_rows), ranges, {y.data(), rows, kHidden, DType::bf16});
    return y;
  }
  /// Returns the same through the overload for host arrays.
  std::vector<uint16_t> expected(const std::vector<int64_t>& first, const std::vector<int64_t>& counts) {
    std::vector<uint16_t> y(x.size(), kCanary);
    mlp.forward(x.data(), first, counts, y.data());
    return y;
  }
};

TEST(ExpertRows, GiveTheBitsOfHostArrays) {
  Small s;
  const std::vector<int64_t> first{20, 0, 31}, counts{11, 17, 5};
  const ExpertRows ranges{.num_rows = counts.data(), .first_row = first.data()};
  EXPECT_EQ(s.run(ranges), s.expected(first, counts));
  const std::vector<int32_t> narrow{11, 17, 5};
  EXPECT_EQ(s.run({.num_rows_32 = narrow.data(), .first_row = first.data()}), s.expected(first, counts));
}

TEST(ExpertRows, MaskedRows) {
  Small s;
  const std::vector<int32_t> counts{4, 0, 12};
  const ExpertRows ranges{.num_rows_32 = counts.data(), .rows_per_expert = 13};
  EXPECT_EQ(s.run(ranges), s.expected({0, 13, 26}, {4, 0, 12}));
}

// Tests negative counts, counts beyond the next expert's rows, and rows beyond the end of x or y.
TEST(ExpertRows, RowsThatAreNotThereAreLeftOut) {
  Small s;
  const std::vector<int32_t> counts{-4, 20, 99};
  const ExpertRows ranges{.num_rows_32 = counts.data(), .rows_per_expert = 15};
  EXPECT_EQ(s.run(ranges), s.expected({0, 15, 30}, {0, 15, 10}));
  EXPECT_EQ(s.run(ranges, 33), s.expected({0, 15, 30}, {0, 15, 3}));
  EXPECT_EQ(s.run(ranges, kRows, 28), s.expected({0, 15, 30}, {0, 13, 0}));
  EXPECT_EQ(s.run(ranges, 0), std::vector<uint16_t>(s.x.size(), kCanary));
  const std::vector<int64_t> first{39, 40, 1000}, many{9, 9, 9};
  EXPECT_EQ(s.run({.num_rows = many.data(), .first_row = first.data()}), s.expected({39, 0, 0}, {1, 0, 0}));
}

TEST(ExpertRows, NoRowsAndNoExperts) {
  Small s;
  const std::vector<int64_t> zero(3);
  s.mlp.forward({nullptr, 0, kHidden, DType::bf16}, {.num_rows = zero.data()}, {nullptr, 0, kHidden, DType::bf16});
  ExpertMlp none(ExpertShape{kHidden, kWidth, 0}, nullptr, nullptr);  // a rank may hold no experts
  none.forward(s.input(), ExpertRows::of(Dispatched()), {s.x.data(), kRows, kHidden, DType::bf16});
  none.forward({nullptr, 0, kHidden, DType::bf16}, {}, {nullptr, 0, kHidden, DType::bf16});
}

/// Returns the code and the text of the Error thrown by `call`.
template <class Call>
std::pair<ErrorCode, std::string> error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {ErrorCode::system, "no error"};
}

template <class Call>
void expect_error(ErrorCode code, const std::string& part, Call&& call) {
  const auto [found, text] = error_of(call);
  EXPECT_EQ(found, code) << text;
  EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' should contain '" << part << "'";
}

TEST(ExpertRows, ErrorsNameTheArgument) {
  Small s;
  std::vector<uint16_t> y(s.x.size(), kCanary);
  const std::vector<int64_t> counts{1, 1, 1}, before{0, -2, 4};
  const std::vector<int32_t> narrow{1, 1, 1};
  const ExpertRows good{.num_rows = counts.data(), .rows_per_expert = 8};
  const Rows out{y.data(), kRows, kHidden, DType::bf16};
  const auto refused = [&](const std::string& part, const ConstRows& x, const ExpertRows& rows, const Rows& to) {
    expect_error(ErrorCode::invalid_argument, part, [&] { s.mlp.forward(x, rows, to); });
  };
  refused("ExpertMlp::forward: x is of f16: must be of bf16", {s.x.data(), kRows, kHidden, DType::f16}, good, out);
  refused("x has 8 columns: must have 24", {s.x.data(), kRows, 8, DType::bf16}, good, out);
  refused("x has -1 rows", s.input(-1), good, out);
  refused("x is null", {nullptr, kRows, kHidden, DType::bf16}, good, out);
  refused("y is of f32", s.input(), good, {y.data(), kRows, kHidden, DType::f32});
  refused("y is null", s.input(), good, {nullptr, kRows, kHidden, DType::bf16});
  refused("rows: give num_rows or num_rows_32", s.input(), {}, out);
  refused("rows: give num_rows or num_rows_32", s.input(), {.num_rows = counts.data(), .num_rows_32 = narrow.data()}, out);
  refused("rows.rows_per_expert = -1", s.input(), {.num_rows = counts.data(), .rows_per_expert = -1}, out);
  refused("rows.first_row of local expert 1 is -2", s.input(), {.num_rows = counts.data(), .first_row = before.data()}, out);
  EXPECT_EQ(y, std::vector<uint16_t>(y.size(), kCanary)) << "a refused call wrote something";
}

alignas(16) constexpr uint16_t kNoWeights[9] = {};

// Errors raised before the code looks for a GPU.
TEST(ExpertOptions, ErrorsNameTheOption) {
  const ExpertOptions gpu{.backend = Backend::cuda, .storage = WeightStorage::view, .max_rows = 8};
  const auto refused = [&](ErrorCode code, const std::string& part, ExpertShape shape, ExpertOptions options,
                           const uint16_t* w13 = kNoWeights) {
    expect_error(code, part, [&] { ExpertMlp(shape, w13, kNoWeights, options); });
  };
  const auto invalid = ErrorCode::invalid_argument;
  ExpertOptions options = gpu;
  options.storage = WeightStorage::packed;
  refused(invalid, "options.storage is packed; allowed on GPUs: view", {16, 8, 1}, options);
  options = gpu;
  options.max_rows = -1;
  refused(invalid, "options.max_rows is -1", {16, 8, 1}, options);
  options = gpu;
  options.dtype = DType::f32;
  refused(invalid, "options.dtype is f32; allowed: bf16, and on GPUs f16 and fp8_e4m3", {16, 8, 1}, options);
  options.backend = static_cast<Backend>(7);
  refused(invalid, "options.backend is 7; allowed: cpu (0) or cuda (1)", {16, 8, 1}, options);
  refused(invalid, "shape.hidden is 12; allowed on GPUs: a multiple of 8", {12, 8, 1}, gpu);
  refused(invalid, "shape.intermediate is 4; allowed on GPUs: a multiple of 8", {16, 4, 1}, gpu);
  refused(invalid, "shape.num_local_experts is 2049; allowed on GPUs: 0 to 2048", {16, 8, 2049}, gpu);
  refused(invalid, "w13 must begin at a multiple of 16 bytes", {16, 8, 1}, gpu, kNoWeights + 1);
  refused(ErrorCode::unsupported, "options.dtype is f16; allowed on the CPU: bf16", {16, 8, 1}, {.dtype = DType::f16});
  refused(ErrorCode::unsupported, "options.dtype is fp8_e4m3; allowed on the CPU: bf16", {16, 8, 1},
          {.dtype = DType::fp8_e4m3});
  options = gpu;
  options.dtype = DType::fp8_e4m3;
  refused(invalid, "shape.intermediate is 24; allowed on GPUs in fp8: a multiple of 16", {16, 24, 1}, options);
  refused(invalid, "options.w13_scales is null", {16, 32, 1}, options);
  const float* const scales = reinterpret_cast<const float*>(kNoWeights);
  const char* const given = "options.intermediate_scale is given; allowed: null unless options.intermediate_scaling is fixed";
  options.w13_scales = options.w2_scales = options.intermediate_scale = scales;
  for (const int experts : {0, 1}) {
    refused(invalid, given, {16, 32, experts}, options);
    refused(invalid, given, {16, 8, experts}, {.intermediate_scale = scales});
  }
  options.scaling = ScaleGranularity::per_channel;
  refused(invalid, given, {16, 32, 1}, options);
  options.intermediate_scaling = OutputScaling::fixed;
  options.intermediate_scale = nullptr;
  refused(invalid, "options.intermediate_scale is null; allowed: for OutputScaling::fixed one scale", {16, 32, 1}, options);
  options.intermediate_scale = reinterpret_cast<const float*>(reinterpret_cast<const char*>(kNoWeights) + 2);
  refused(invalid, "options.intermediate_scale must begin at a multiple of 4 bytes", {16, 32, 1}, options);
  options = gpu;
  options.dtype = DType::fp8_e4m3;
  EXPECT_EQ(ExpertMlp::memory_required({16, 160, 3}, options).total(), 8u * (160 + 16));
  EXPECT_EQ(ExpertMlp::memory_required({16, 24, 3}, gpu).total(), 8u * 24 * 2);
  EXPECT_EQ(ExpertMlp::memory_required({16, 24, 0}, gpu).total(), 0u);
}

// The required ExpertOptions::max_rows, for ranks with and without padding.
TEST(MostRows, AreThoseOfAWorstCaseDispatch) {
  for (const Layout layout : {Layout::expert_major, Layout::rank_major}) {
    LayerCase c;
    c.tokens = {7};
    NormalConfig config = c.normal();
    config.layout = layout;
    GroupOptions options;
    options.heap_bytes = NormalExchange::heap_bytes(config, 1);
    std::vector<Group> groups = Group::in_process(1, options);
    NormalExchange exchange(groups[0], config);
    const std::vector<uint16_t> x(static_cast<size_t>(7 * config.hidden));
    const std::vector<int32_t> ids(static_cast<size_t>(7 * config.topk), 2);
    const Dispatched d = exchange.dispatch({x.data(), 7, config.hidden, DType::bf16}, ExpertIds::of(ids.data(), 7, config.topk),
                                           nullptr, {.size = SizePolicy::worst_case});
    EXPECT_EQ(d.x.rows, max_rows(config, 1));
    EXPECT_EQ(d.x.rows, layout == Layout::rank_major ? 7 : 4 * 4 + 20);  // a row for each of four experts, 17 for the fifth
  }
}

class ExpertLayers : public ::testing::TestWithParam<LayerCase> {};

TEST_P(ExpertLayers, OfSeparateCalls) {
  const LayerCase& c = GetParam();
  GroupOptions options;
  options.heap_bytes = c.heap_bytes(Backend::cpu);
  std::vector<Group> groups = Group::in_process(c.world(), options);
  std::vector<std::string> found(groups.size());
  std::vector<std::thread> ranks;
  for (size_t r = 0; r < groups.size(); ++r) {
    ranks.emplace_back([&, r] {
      try {
        HostRig rig;
        ExpertLayer<HostRig> layer(rig, groups[r], c);
        for (uint32_t call = 0; call < 2; ++call) {
          layer.write(call);
          layer.call();
          found[r] += layer.judge(call);
        }
      } catch (const std::exception& error) {
        found[r] += error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const std::string& text : found) EXPECT_EQ(text, "");
}

INSTANTIATE_TEST_SUITE_P(Cpu, ExpertLayers, ::testing::ValuesIn(testing::layer_cases()),
                         [](const auto& c) { return c.param.name; });

}  // namespace
}  // namespace switchyard

// SPDX-License-Identifier: Apache-2.0
// Compares gradients of experts' weights with float64: shapes, types, accumulation, and independence from other data.
#include <limits>
#include <string>
#include <utility>

#include "gpu/gemm/gradient_rig.hpp"

namespace gemm_test {
namespace {

using switchyard::ErrorCode;
using switchyard::ExpertRows;
using switchyard::WeightGradient;

GradientCase case_of(int64_t n, int64_t k, int variant = 0) {
  return {n, k, (variant & 1) != 0, (variant & 2) == 0, (variant & 4) != 0};
}

class GradientVariants : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WeightGradient, GradientVariants, testing::Range(0, 8), [](const testing::TestParamInfo<int>& i) {
  return std::string(i.param & 1 ? "f16" : "bf16") + (i.param & 2 ? "_narrow" : "_wide") + (i.param & 4 ? "_add" : "");
});

// Sums of integers are exact in float32, so every bit of every gradient is known.
TEST_P(GradientVariants, IntegersAreExact) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{256, 192},
                             {256, 64},
                             {512, 320},
                             {264, 8},
                             {8, 200},
                             {960, 480},
                             {128, 448},
                             {1000, 1000}}) {
    GradientRig rig(case_of(n, k, GetParam()), gradient_counts(), Fill::integers, 3);
    rig.run();
    const Difference d = rig.difference();
    EXPECT_EQ(d.unequal, 0) << "of " << d.elements << ", n " << n << ", k " << k;
  }
}

TEST_P(GradientVariants, NormalData) {
  const GradientCase c = case_of(1920, 512, GetParam());
  GradientRig rig(c, gradient_counts(), Fill::normal, 1);
  rig.run();
  const Difference d = rig.difference();
  EXPECT_GT(d.elements, 0);
  EXPECT_LE(d.norm, c.wide ? 1e-4 : 5e-3);
}

TEST_P(GradientVariants, ShapesOfModels) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{5760, 2880}, {2880, 2880}, {1536, 2048}, {2048, 768}, {4096, 7168}}) {
    const GradientCase c = case_of(n, k, GetParam());
    GradientRig rig(c, {100, 0, 257}, Fill::normal);
    rig.run();
    EXPECT_LE(rig.difference().norm, c.wide ? 1e-4 : 5e-3) << "n " << n << ", k " << k;
  }
}

// Rows of other experts are in the memory of the last stage. NaNs in them must not affect this expert.
TEST_P(GradientVariants, NeighboursHaveNoInfluence) {
  for (const int64_t rows : {1, 15, 17, 31, 33, 47, 63, 65, 95, 97, 150}) {
    GradientRig rig(case_of(320, 264, GetParam()), {rows, 40, rows, 1, 0}, Fill::integers);
    rig.spoil(rig.first()[1], 40);
    rig.spoil(rig.first()[3], 1);
    rig.run();
    for (const int e : {0, 2, 4}) EXPECT_EQ(rig.difference(e).unequal, 0) << rows << " rows, expert " << e;
    for (const int e : {1, 3}) EXPECT_TRUE(rig.begins_with_nan(e)) << rows << " rows, expert " << e;
  }
}

// The bits of an expert's gradients depend neither on its neighbors, nor on the position of its rows, nor on the multiprocessor
// count.
TEST_P(GradientVariants, BitsOfAnExpertDependOnNothingElse) {
  GradientRig rig(case_of(520, 456, GetParam()), {300, 111, 77, 400, 0}, Fill::normal);
  rig.run();
  const int64_t halves = rig.expert_bytes() / 2;
  DeviceBytes first(rig.expert_bytes());
  ok(cudaMemcpy(first.as(), rig.dw_of(1), static_cast<size_t>(rig.expert_bytes()), cudaMemcpyDeviceToDevice));
  const auto expect_same = [&](const char* what) {
    EXPECT_EQ(count_unequal(first.as(), rig.dw_of(1), halves), 0) << what;
    rig.forget();
  };
  for (const int sms : {1, 2, 7, 64}) {
    rig.forget();
    rig.run({nullptr, sms});
    expect_same("other multiprocessors");
  }
  rig.set_counts({0, 111, 5, 1, 0});
  rig.run();
  expect_same("other neighbours");
  // The same rows, copied to another expert's position at a different distance from the end of a stage.
  const switchyard::ConstRows dy = rig.dy(), x = rig.x();
  const int64_t to = rig.first()[3] + 13, from = rig.first()[1];
  for (const switchyard::ConstRows& r : {dy, x}) {
    char* const memory = static_cast<char*>(const_cast<void*>(r.data));
    ok(cudaMemcpy(memory + to * r.cols * 2, memory + from * r.cols * 2, static_cast<size_t>(111 * r.cols * 2),
                  cudaMemcpyDeviceToDevice));
  }
  DeviceBytes elsewhere(5 * 8);
  elsewhere.set(std::vector<int64_t>{0, to, 300, 0, 0});
  ExpertRows moved = rig.ranges();
  moved.first_row = elsewhere.as<int64_t>();
  rig.gradient().run(dy, x, moved, rig.dw());
  expect_same("another place");
}

TEST_P(GradientVariants, MaskedRowsOfLowLatency) {
  constexpr int64_t kEach = 100;
  GradientRig rig(case_of(256, 200, GetParam()), {kEach, kEach, kEach, kEach}, Fill::integers);
  const std::vector<int64_t> given = {7, 0, 100, 33};
  for (size_t e = 0; e < given.size(); ++e) rig.spoil(rig.first()[e] + given[e], kEach - given[e]);
  DeviceBytes counts(16);
  counts.set(std::vector<int32_t>{7, 0, 100, 33});
  ExpertRows r;
  r.num_rows_32 = counts.as<int32_t>();
  r.rows_per_expert = kEach;
  rig.gradient().run(rig.dy(), rig.x(), r, rig.dw());
  rig.set_counts(given);
  EXPECT_EQ(rig.difference().unequal, 0);
}

// Whatever counts a failed dispatch has left behind, these experts have no rows.
TEST_P(GradientVariants, CountsThatCannotBe) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min(), kMax = std::numeric_limits<int64_t>::max();
  GradientRig rig(case_of(256, 128, GetParam()), {20, 20, 20, 20}, Fill::integers);
  rig.num_rows().set(std::vector<int64_t>{-5, kMin, 0, kMax});
  rig.run();
  ok(cudaDeviceSynchronize());
  rig.set_counts({0, 0, 0, 20});  // ends exactly at the end of the rows
  EXPECT_EQ(rig.difference().unequal, 0);
  rig.forget();
  DeviceBytes first(32);
  first.set(std::vector<int64_t>{-8, kMin, kMax, 70});
  rig.set_counts({20, 20, 20, 20});
  ExpertRows elsewhere = rig.ranges();
  elsewhere.first_row = first.as<int64_t>();
  rig.gradient().run(rig.dy(), rig.x(), elsewhere, rig.dw());
  rig.set_counts({0, 0, 0, 10});
  rig.set_first({0, 0, 0, 70});
  EXPECT_EQ(rig.difference().unequal, 0);
}

TEST_P(GradientVariants, NoRowsAtAll) {
  GradientRig rig(case_of(264, 72, GetParam()), {0, 0, 0}, Fill::integers);
  for (int i = 0; i < 3; ++i) rig.run();
  EXPECT_EQ(rig.difference().unequal, 0) << "rows.rows is 0";
  GradientRig empty(case_of(264, 72, GetParam()), {0, 0, 0}, Fill::integers, 2);
  for (int i = 0; i < 3; ++i) empty.run();
  EXPECT_EQ(empty.difference().unequal, 0) << "rows of nobody";
}

TEST_P(GradientVariants, OneExpertWithEverything) {
  std::vector<int64_t> rows(64, 0);
  rows[40] = 20000;
  GradientRig rig(case_of(512, 256, GetParam()), rows, Fill::integers);
  rig.run();
  EXPECT_EQ(rig.difference().unequal, 0);
}

// Counts are read when a graph runs, not when it is captured.
TEST_P(GradientVariants, GraphsWithOtherCounts) {
  GradientRig rig(case_of(512, 256, GetParam()), {300, 300, 300, 300}, Fill::integers);
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  rig.run({stream, 0});
  cudaGraph_t graph = nullptr;
  ok(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec = nullptr;
  ok(cudaGraphInstantiate(&exec, graph, 0));
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{300, 1, 0, 17}, {0, 0, 0, 300}, {5, 299, 192, 193}}) {
    for (int i = 0; i < 2; ++i) {
      rig.forget();
      rig.set_counts(counts);
      ok(cudaDeviceSynchronize());
      ok(cudaGraphLaunch(exec, stream));
      ok(cudaStreamSynchronize(stream));
      EXPECT_EQ(rig.difference().unequal, 0);
    }
  }
  ok(cudaGraphExecDestroy(exec));
  ok(cudaGraphDestroy(graph));
  ok(cudaStreamDestroy(stream));
}

TEST(WeightGradientCalls, AsManyExpertsAsThereMayBe) {
  for (const int variant : {0, 4}) {
    std::vector<int64_t> rows(static_cast<size_t>(switchyard::kMaxGemmExperts));
    for (size_t e = 0; e < rows.size(); ++e) rows[e] = static_cast<int64_t>(e % 3);
    rows[7] = 200;
    GradientRig rig(case_of(64, 64, variant), rows, Fill::integers);
    rig.run();
    EXPECT_EQ(rig.difference().unequal, 0) << "variant " << variant;
  }
}

// Gradients larger than 4 GiB.
TEST(WeightGradientCalls, FourGiBOfFloats) {
  GradientRig rig(case_of(7168, 7168, 0), {60, 0, 33, 100, 16, 1, 50, 129, 64, 7, 0, 40, 3, 20, 90, 11, 8, 77, 2, 65, 31, 96},
                  Fill::integers);
  rig.run();
  EXPECT_EQ(rig.difference().unequal, 0);
}

TEST(WeightGradientCalls, AddsAgain) {
  GradientRig rig(case_of(256, 128, 4), {50, 0, 20}, Fill::integers);
  rig.run();
  EXPECT_EQ(rig.difference().unequal, 0);
  rig.run();
  EXPECT_GT(rig.difference().unequal, 0) << "the second call added nothing";
}

TEST(WeightGradientErrors, NameTheMember) {
  GradientRig rig(case_of(256, 128, 0), {8, 8}, Fill::integers);
  const auto with = [&](auto&& change) {
    return [change, c = rig.config()]() mutable {
      change(c);
      const WeightGradient made(c);
    };
  };
  constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;
  expect_error(kInvalid, "WeightGradient: num_experts = 0", with([](auto& c) { c.num_experts = 0; }));
  expect_error(kInvalid, "num_experts = 2049", with([](auto& c) { c.num_experts = 2049; }));
  expect_error(kInvalid, "n = 100", with([](auto& c) { c.n = 100; }));
  expect_error(kInvalid, "k = 12", with([](auto& c) { c.k = 12; }));
  expect_error(kInvalid, "dtype = f32", with([](auto& c) { c.dtype = switchyard::DType::f32; }));
  expect_error(kInvalid, "out_dtype = f16", with([](auto& c) { c.out_dtype = switchyard::DType::f16; }));
  switchyard::ConstRows x = rig.x();
  x.cols = 64;
  expect_error(kInvalid, "x has 64 columns", [&] { rig.gradient().run(rig.dy(), x, rig.ranges(), rig.dw()); });
  switchyard::ConstRows dy = rig.dy();
  dy.data = static_cast<const char*>(dy.data) + 2;
  expect_error(kInvalid, "dy must begin", [&] { rig.gradient().run(dy, rig.x(), rig.ranges(), rig.dw()); });
  expect_error(kInvalid, "dw is null", [&] { rig.gradient().run(rig.dy(), rig.x(), rig.ranges(), nullptr); });
  expect_error(kInvalid, "num_sms = 1000", [&] { rig.run({nullptr, 1000}); });
  expect_error(kInvalid, "rows: give", [&] { rig.gradient().run(rig.dy(), rig.x(), {}, rig.dw()); });
  WeightGradient moved(std::move(rig.gradient()));
  expect_error(kInvalid, "WeightGradient is empty", [&] { rig.run(); });
  moved.run(rig.dy(), rig.x(), rig.ranges(), rig.dw());
  EXPECT_EQ(rig.difference().unequal, 0) << "after errors";
}

}  // namespace
}  // namespace gemm_test

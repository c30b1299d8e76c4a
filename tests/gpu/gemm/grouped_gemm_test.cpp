// SPDX-License-Identifier: Apache-2.0
// Compares the grouped GEMM with float64: shapes, weight orders, types, epilogues, memory that must stay untouched, and bits
// that must not depend on anything else.
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "gpu/gemm/gemm_rig.hpp"

namespace gemm_test {
namespace {

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::ExpertRows;
using switchyard::GroupedGemm;
using switchyard::GroupedGemmOptions;

/// Every class of row counts: none, one, and counts around a step of 16, one tile and two tiles.
std::vector<int64_t> many_counts() { return {1, 15, 16, 17, 0, 255, 256, 257, 191, 192, 193, 0, 384, 385, 33, 1600}; }

Problem problem(size_t experts, int64_t n, int64_t k, int variant) {
  Problem p;
  p.num_experts = static_cast<int>(experts);
  p.n = n;
  p.k = k;
  p.f16 = (variant & 1) != 0;
  p.outputs_outside = (variant & 2) == 0;
  return p;
}

class Variants : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(GroupedGemm, Variants, testing::Range(0, 4), [](const testing::TestParamInfo<int>& i) {
  return std::string(i.param & 1 ? "f16" : "bf16") + (i.param & 2 ? "_kn" : "_nk");
});

// Sums of integers are exact in float32, so every bit of every output is known.
TEST_P(Variants, IntegersAreExact) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{256, 64}, {512, 320}, {264, 8}, {8, 200}, {960, 480}, {1000, 1000}}) {
    for (const int epilogue : {0, 1}) {
      Problem p = problem(many_counts().size(), n, k, GetParam());
      p.epilogue = epilogue;
      GemmRig rig(p, many_counts(), Fill::integers, 3);
      rig.run();
      const Difference d = rig.difference();
      EXPECT_EQ(d.unequal, 0) << "of " << d.elements << ", n " << n << ", k " << k << ", epilogue " << epilogue;
      EXPECT_EQ(rig.touched_outside(), 0) << "n " << n << ", k " << k;
    }
  }
}

TEST_P(Variants, EpiloguesOfNormalData) {
  struct Case {
    int epilogue;
    float limit, alpha, shift;
  };
  for (const Case c : {Case{0, 0, 1, 0}, {2, 0, 1, 0}, {3, 0, 1, 0}, {3, 0.5F, 1, 0}, {3, 7.F, 1.702F, 1.F}}) {
    Problem p = problem(many_counts().size(), 1920, 512, GetParam());
    p.epilogue = c.epilogue;
    p.limit = c.limit;
    p.alpha = c.alpha;
    p.shift = c.shift;
    GemmRig rig(p, many_counts(), Fill::normal, 1);
    rig.run();
    const Difference d = rig.difference();
    EXPECT_GT(d.elements, 0);
    EXPECT_LE(d.norm, 5e-3) << "epilogue " << c.epilogue << ", limit " << c.limit;
    EXPECT_EQ(rig.touched_outside(), 0);
  }
}

TEST_P(Variants, ShapesOfModels) {
  struct Case {
    int64_t n, k;
    int epilogue;
  };
  // gpt-oss has hidden 2880; Qwen has 2048 and 768; others have intermediate 480 and 1536.
  for (const Case c : {Case{5760, 2880, 3},
                       {2880, 2880, 0},
                       {1536, 2048, 3},
                       {2048, 768, 0},
                       {960, 4096, 3},
                       {4096, 480, 0},
                       {3072, 4096, 3},
                       {4096, 1536, 0}}) {
    Problem p = problem(5, c.n, c.k, GetParam());
    p.epilogue = c.epilogue;
    GemmRig rig(p, {100, 0, 257, 16, 700}, Fill::normal);
    rig.run();
    EXPECT_LE(rig.difference(97).norm, 5e-3) << "n " << c.n << ", k " << c.k;
  }
}

// The bits of a row depend neither on its position in a tile, nor on its neighbors, nor on the number of multiprocessors.
TEST_P(Variants, BitsOfARowDependOnNothingElse) {
  for (const int epilogue : {0, 3}) {
    Problem p = problem(1, 512, 1024, GetParam());
    p.epilogue = epilogue;
    constexpr int64_t kRows = 500;
    GemmRig rig(p, {kRows}, Fill::normal);
    rig.run();
    DeviceBytes first(kRows * p.columns() * 2);
    ok(cudaMemcpy(first.as(), rig.out().data, static_cast<size_t>(kRows * p.columns() * 2), cudaMemcpyDeviceToDevice));
    const auto compare_window = [&](int64_t at, int64_t rows, int sms) {
      rig.forget();
      DeviceBytes range(16), count(16);
      range.set(std::vector<int64_t>{at});
      count.set(std::vector<int64_t>{rows});
      ExpertRows r;
      r.num_rows = count.as<int64_t>();
      r.first_row = range.as<int64_t>();
      rig.gemm().run(rig.x(), r, rig.out(), {nullptr, sms});
      const int64_t from = at * p.columns(), elements = rows * p.columns();
      EXPECT_EQ(count_unequal(first.as<uint16_t>() + from, rig.memory_of_out().as<uint16_t>() + from, elements), 0)
          << rows << " rows from " << at << " on " << sms << " multiprocessors, epilogue " << epilogue;
    };
    for (int64_t rows = 1; rows <= 200; rows += 13) compare_window(rows % 7, rows, 0);
    for (const int64_t rows : {16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 384, 400}) compare_window(5, rows, 0);
    for (const int sms : {1, 2, 7, 64}) compare_window(0, kRows, sms);
  }
}

TEST(GroupedGemmRows, MaskedRowsOfLowLatency) {
  Problem p = problem(4, 256, 128, 0);
  constexpr int64_t kEach = 100;
  GemmRig rig(p, {kEach, kEach, kEach, kEach}, Fill::integers);
  DeviceBytes counts(16);
  counts.set(std::vector<int32_t>{7, 0, 100, 33});
  ExpertRows r;
  r.num_rows_32 = counts.as<int32_t>();
  r.rows_per_expert = kEach;
  rig.gemm().run(rig.x(), r, rig.out());
  rig.set_counts({7, 0, 100, 33});
  EXPECT_EQ(rig.difference().unequal, 0);
  EXPECT_EQ(rig.touched_outside(), 0);
}

// Whatever counts a failed dispatch has left behind, nothing outside the rows is touched.
TEST(GroupedGemmRows, CountsThatCannotBe) {
  Problem p = problem(4, 256, 128, 0);
  GemmRig rig(p, {20, 20, 20, 20}, Fill::integers);
  rig.num_rows().set(std::vector<int64_t>{-5, std::numeric_limits<int64_t>::min(), 0, std::numeric_limits<int64_t>::max()});
  rig.run();
  ok(cudaDeviceSynchronize());
  rig.set_counts({0, 0, 0, 20});  // ends exactly at the end of the rows
  EXPECT_EQ(rig.difference().unequal, 0);
  EXPECT_EQ(rig.touched_outside(), 0);
  rig.forget();
  DeviceBytes first(32);
  first.set(std::vector<int64_t>{-8, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), 60});
  rig.set_counts({20, 20, 20, 20});
  ExpertRows elsewhere = rig.ranges();
  elsewhere.first_row = first.as<int64_t>();
  rig.gemm().run(rig.x(), elsewhere, rig.out());
  rig.set_counts({0, 0, 0, 20});
  EXPECT_EQ(rig.difference().unequal, 0);
  EXPECT_EQ(rig.touched_outside(), 0);
  DeviceBytes masked(16);
  masked.set(std::vector<int32_t>{1 << 30, -1, 25, 20});
  ExpertRows r;
  r.num_rows_32 = masked.as<int32_t>();
  r.rows_per_expert = 20;
  rig.forget();
  rig.gemm().run(rig.x(), r, rig.out());
  rig.set_counts({20, 0, 20, 20});
  EXPECT_EQ(rig.difference().unequal, 0);
  EXPECT_EQ(rig.touched_outside(), 0);
}

TEST(GroupedGemmRows, NoRowsAtAll) {
  Problem p = problem(3, 256, 128, 0);
  GemmRig rig(p, {0, 0, 0}, Fill::integers, 2);
  for (int i = 0; i < 3; ++i) rig.run();
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(rig.touched_outside(), 0);
}

TEST(GroupedGemmRows, OneExpertWithEverything) {
  Problem p = problem(64, 512, 256, 0);
  std::vector<int64_t> rows(64, 0);
  rows[40] = 20000;
  GemmRig rig(p, rows, Fill::integers);
  rig.run();
  EXPECT_EQ(rig.difference().unequal, 0);
}

TEST(GroupedGemmRows, AsManyExpertsAsThereMayBe) {
  Problem p = problem(switchyard::kMaxGemmExperts, 64, 64, 0);
  std::vector<int64_t> rows(static_cast<size_t>(p.num_experts));
  for (size_t e = 0; e < rows.size(); ++e) rows[e] = static_cast<int64_t>(e % 3);
  rows[7] = 200;
  GemmRig rig(p, rows, Fill::integers);
  rig.run();
  EXPECT_EQ(rig.difference().unequal, 0);
  EXPECT_EQ(rig.touched_outside(), 0);
}

// Rows and outputs larger than 4 GiB.
TEST(GroupedGemmRows, ThreeHundredThousandRows) {
  Problem p = problem(3, 7168, 7168, 0);
  GemmRig rig(p, {100000, 1, 199999}, Fill::normal);
  rig.run();
  EXPECT_LE(rig.difference(40009).norm, 5e-3);
  const int64_t elements = rig.total() * p.columns();
  EXPECT_EQ(count_other(rig.out().data, elements, kUntouched), elements) << "an output was not written";
}

TEST(GroupedGemmCalls, NanStaysWithItsRow) {
  for (const int epilogue : {0, 1, 2, 3}) {
    Problem p = problem(1, 256, 64, 0);
    p.epilogue = epilogue;
    p.limit = 1.F;
    GemmRig rig(p, {50}, Fill::integers);
    const uint16_t nan = 0x7fc0;
    ok(cudaMemcpy(const_cast<uint16_t*>(static_cast<const uint16_t*>(rig.x().data)) + 20 * p.k, &nan, 2,
                  cudaMemcpyHostToDevice));
    rig.run();
    std::vector<uint16_t> out(static_cast<size_t>(50 * p.columns()));
    ok(cudaMemcpy(out.data(), rig.out().data, out.size() * 2, cudaMemcpyDeviceToHost));
    for (int64_t r = 0; r < 50; ++r)
      for (int64_t c = 0; c < p.columns(); ++c)
        ASSERT_EQ((out[static_cast<size_t>(r * p.columns() + c)] & 0x7fff) > 0x7f80, r == 20)
            << "row " << r << ", column " << c << ", epilogue " << epilogue;
  }
}

// Counts are read when a graph runs, not when it is captured.
TEST(GroupedGemmCalls, GraphsWithOtherCounts) {
  Problem p = problem(4, 512, 256, 0);
  GemmRig rig(p, {300, 300, 300, 300}, Fill::integers);
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  rig.run({stream, 0});
  cudaGraph_t graph = nullptr;
  ok(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec = nullptr;
  ok(cudaGraphInstantiate(&exec, graph, 0));
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{300, 1, 0, 17}, {0, 0, 0, 300}, {5, 299, 192, 193}}) {
    rig.forget();
    rig.set_counts(counts);
    ok(cudaDeviceSynchronize());
    for (int i = 0; i < 3; ++i) ok(cudaGraphLaunch(exec, stream));
    ok(cudaStreamSynchronize(stream));
    EXPECT_EQ(rig.difference().unequal, 0);
    EXPECT_EQ(rig.touched_outside(), 0);
  }
  ok(cudaGraphExecDestroy(exec));
  ok(cudaGraphDestroy(graph));
  ok(cudaStreamDestroy(stream));
}

// Two threads destroy objects, then the streams that used them, at the same time. Memory released by one thread must not make
// the other thread access a destroyed stream.
TEST(GroupedGemmCalls, StreamsEndAfterTheObjectsOfTheirThread) {
  Problem p = problem(2, 64, 64, 0);
  GemmRig rig(p, {40, 24}, Fill::integers);
  const switchyard::Rows out = rig.out();
  const auto rounds = [&](bool captures) {
    DeviceBytes own(out.rows * p.columns() * 2);
    switchyard::Rows to = out;
    to.data = own.as();
    for (int round = 0; round < 150; ++round) {
      cudaStream_t stream = nullptr;
      cudaGraph_t graph = nullptr;
      ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      {
        switchyard::GroupedGemm gemm(config_of(p), rig.weights());
        gemm.run(rig.x(), rig.ranges(), to, {stream, 0});
        if (captures) {
          ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
          gemm.run(rig.x(), rig.ranges(), to, {stream, 0});
          ok(cudaStreamEndCapture(stream, &graph));
        }
      }
      ok(cudaStreamSynchronize(stream));
      ok(cudaStreamDestroy(stream));
      if (graph != nullptr) ok(cudaGraphDestroy(graph));  // the last owner of the object's memory
    }
  };
  std::thread other(rounds, true);
  rounds(false);
  other.join();
  rig.run();
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(rig.difference().unequal, 0);
}

void expect_error(ErrorCode code, const std::string& part, const std::function<void()>& f) {
  try {
    f();
    ADD_FAILURE() << "no error that says " << part;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST(GroupedGemmErrors, NameTheMember) {
  Problem p = problem(2, 256, 128, 0);
  GemmRig rig(p, {8, 8}, Fill::integers);
  const auto with = [&](auto&& change) {
    return [&rig, change, c = config_of(p)]() mutable {
      change(c);
      GroupedGemm(c, rig.x().data);
    };
  };
  expect_error(ErrorCode::invalid_argument, "num_experts = 0", with([](auto& c) { c.num_experts = 0; }));
  expect_error(ErrorCode::invalid_argument, "num_experts = 2049", with([](auto& c) { c.num_experts = 2049; }));
  expect_error(ErrorCode::invalid_argument, "n = 100", with([](auto& c) { c.n = 100; }));
  expect_error(ErrorCode::invalid_argument, "n = 104",
               with([](auto& c) { c.n = 104, c.epilogue = switchyard::Epilogue::swiglu; }));
  expect_error(ErrorCode::invalid_argument, "k = 12", with([](auto& c) { c.k = 12; }));
  expect_error(ErrorCode::invalid_argument, "dtype = f32", with([](auto& c) { c.dtype = switchyard::DType::f32; }));
  expect_error(ErrorCode::invalid_argument, "swiglu.limit", with([](auto& c) { c.swiglu.limit = 0; }));
  expect_error(ErrorCode::invalid_argument, "weights is null", [&] { GroupedGemm(config_of(p), nullptr); });
  switchyard::ConstRows x = rig.x();
  x.cols = 64;
  expect_error(ErrorCode::invalid_argument, "x has 64 columns", [&] { rig.gemm().run(x, rig.ranges(), rig.out()); });
  switchyard::Rows out = rig.out();
  out.data = static_cast<char*>(out.data) + 2;
  expect_error(ErrorCode::invalid_argument, "out must begin", [&] { rig.gemm().run(rig.x(), rig.ranges(), out); });
  expect_error(ErrorCode::invalid_argument, "num_sms = 1000", [&] { rig.run({nullptr, 1000}); });
  expect_error(ErrorCode::invalid_argument, "rows: give", [&] { rig.gemm().run(rig.x(), {}, rig.out()); });
  rig.run();
  EXPECT_EQ(rig.difference().unequal, 0) << "after errors";
}

}  // namespace
}  // namespace gemm_test

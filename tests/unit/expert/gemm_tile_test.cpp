// SPDX-License-Identifier: Apache-2.0
// Compares tiles of the grouped GEMM with integer arithmetic. Operands are small integers, so every product and sum is exact in
// float32, and the results must be equal whatever the kernel's summation order.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "gemm/cpu/tile_gemm.hpp"
#include "gemm_testing.hpp"

namespace switchyard::detail {
namespace {

using testing::expect_success_with;
using testing::small_integers;
using testing::value_of;

struct Size {
  int64_t n, k;
};
constexpr Size kSizes[] = {{1, 1}, {5, 7}, {24, 40}, {33, 129}, {100, 70}, {64, 256}, {513, 96}, {192, 1000}};
constexpr WeightStorage kStorages[] = {WeightStorage::packed, WeightStorage::view};

std::vector<int64_t> all_tile_rows() {
  std::set<int64_t> rows;
  for (int64_t m = 1; m <= kTileRows; ++m) rows.insert(padded_rows(m));
  return {rows.begin(), rows.end()};
}

std::vector<int32_t> integers(const uint16_t* values, int64_t n) {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(static_cast<int32_t>(value_of(values[i])));
  return out;
}

void expect_product(const uint16_t* a, const std::vector<int32_t>& b, const float* c, int64_t m, Size size) {
  const std::vector<int32_t> rows = integers(a, m * size.k);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < size.n; ++j) {
      const int32_t *left = rows.data() + i * size.k, *right = b.data() + j * size.k;
      int32_t exact = 0;
      for (int64_t l = 0; l < size.k; ++l) exact += left[l] * right[l];
      ASSERT_EQ(c[i * size.n + j], static_cast<float>(exact)) << "row " << i << " column " << j;
    }
  }
}

/// Three groups. Operands are misaligned by one element. Memory around c must stay unchanged.
void check_tiles(Size size, WeightStorage storage, const std::vector<int64_t>& rows) {
  constexpr int kGroups = 3;
  constexpr float kCanary = -12345.5f;
  const auto elements = static_cast<size_t>(size.n * size.k);
  std::vector<uint16_t> b(1 + kGroups * elements);
  const std::vector<uint16_t> values = small_integers(kGroups * elements, 9, 11);
  std::copy(values.begin(), values.end(), b.begin() + 1);
  TileGemm gemm(kGroups, size.n, size.k, storage);
  if (storage == WeightStorage::view) {
    gemm.bind(b.data() + 1);
  } else {
    std::vector<uint16_t> passing(b);
    for (int g = 0; g < kGroups; ++g) gemm.pack(g, passing.data() + 1 + static_cast<size_t>(g) * elements);
    std::fill(passing.begin(), passing.end(), uint16_t{0x7FC0});  // packed: the source may be discarded
  }
  std::vector<std::vector<int32_t>> exact_b;
  for (size_t g = 0; g < kGroups; ++g) exact_b.push_back(integers(b.data() + 1 + g * elements, size.n * size.k));
  for (const int64_t m : rows) {
    SCOPED_TRACE(gemm.implementation() + ", m " + std::to_string(m) + ", n " + std::to_string(size.n) + ", k " +
                 std::to_string(size.k));
    for (int g = 0; g < kGroups; ++g) {
      std::vector<uint16_t> a = small_integers(static_cast<size_t>(m * size.k) + 1, 9, static_cast<uint32_t>(m * 3 + g));
      std::vector<float> c(static_cast<size_t>(m * size.n) + 2 + static_cast<size_t>(size.n), kCanary);
      gemm.tile(g, a.data() + 1, m, c.data() + 1);
      ASSERT_NO_FATAL_FAILURE(expect_product(a.data() + 1, exact_b[static_cast<size_t>(g)], c.data() + 1, m, size));
      ASSERT_EQ(c[0], kCanary);
      for (size_t i = static_cast<size_t>(m * size.n) + 1; i < c.size(); ++i) ASSERT_EQ(c[i], kCanary);
    }
  }
}

TEST(GemmTile, ExactForAllTileRowsAndSizes) {
  for (const WeightStorage storage : kStorages) {
    for (const Size size : kSizes) check_tiles(size, storage, {1, 2, 6, 20, 40, 80, 256});
    for (const Size size : {Size{5, 7}, Size{70, 40}}) check_tiles(size, storage, all_tile_rows());
  }
}

// Tests more columns than one panel of widened weights holds, with a partial panel at the end.
TEST(GemmTile, ExactAcrossPanels) {
  for (const WeightStorage storage : kStorages) check_tiles({70, 16500}, storage, {1, 6});
}

TEST(GemmTile, RowsDoNotDependOnEachOther) {
  constexpr Size kSize{80, 60};
  const std::vector<uint16_t> b = small_integers(static_cast<size_t>(kSize.n * kSize.k), 9, 1);
  TileGemm gemm(1, kSize.n, kSize.k, WeightStorage::packed);
  gemm.pack(0, b.data());
  std::vector<uint16_t> a = small_integers(static_cast<size_t>(8 * kSize.k), 9, 2);
  std::fill(a.begin() + 5 * kSize.k, a.end(), uint16_t{0x7FC0});  // NaN in rows 5 to 7
  std::vector<float> c(static_cast<size_t>(8 * kSize.n));
  gemm.tile(0, a.data(), 8, c.data());
  expect_product(a.data(), integers(b.data(), kSize.n * kSize.k), c.data(), 5, kSize);
  for (size_t i = static_cast<size_t>(5 * kSize.n); i < c.size(); ++i) ASSERT_TRUE(std::isnan(c[i]));
}

TEST(GemmTile, MemoryRequiredIsWhatAnObjectTakes) {
  for (const WeightStorage storage : kStorages) {
    for (const Size size : kSizes) {
      const ExpertMemory asked = TileGemm::memory_required(5, size.n, size.k, storage);
      TileGemm gemm(5, size.n, size.k, storage);
      EXPECT_EQ(asked.weight_bytes, gemm.memory().weight_bytes);
      EXPECT_EQ(asked.scratch_bytes, gemm.memory().scratch_bytes);
      EXPECT_EQ(asked.weight_bytes == 0, storage == WeightStorage::view);
      EXPECT_GE(storage == WeightStorage::view ? SIZE_MAX : asked.weight_bytes, static_cast<size_t>(5 * size.n * size.k * 2));
      // The scratch does not grow when every tile is used.
      const std::vector<uint16_t> b(static_cast<size_t>(5 * size.n * size.k)), a(static_cast<size_t>(kTileRows * size.k));
      std::vector<float> c(static_cast<size_t>(kTileRows * size.n));
      gemm.bind(b.data());
      if (storage == WeightStorage::packed) gemm.pack(0, b.data());
      for (const int64_t m : all_tile_rows()) gemm.tile(0, a.data(), m, c.data());
      EXPECT_EQ(asked.scratch_bytes, gemm.memory().scratch_bytes) << size.n << " x " << size.k;
    }
  }
}

TEST(GemmTiling, PaddedRows) {
  EXPECT_EQ(all_tile_rows().size(), 27u);
  EXPECT_EQ(padded_rows(kTileRows), kTileRows);
  for (int64_t m = 1; m <= kTileRows; ++m) {
    EXPECT_GE(padded_rows(m), m);
    EXPECT_EQ(padded_rows(padded_rows(m)), padded_rows(m));
    EXPECT_LE(static_cast<double>(padded_rows(m)), static_cast<double>(m) * (m >= 33 ? 1.231 : 1.334)) << m;
    EXPECT_LE(padded_rows(m) - m, 15);
  }
}

TEST(GemmTiling, TilesCoverEveryRowOnceInOrder) {
  std::vector<int64_t> counts;
  for (int64_t m = 0; m <= 1100; ++m) counts.push_back(m);
  for (int64_t m = 100000; m < 100300; ++m) counts.push_back(m);
  std::vector<int64_t> next(counts.size(), 0);
  int last_group = 0;
  for_each_tile(counts, [&](int group, int64_t first, int64_t rows) {
    ASSERT_GE(group, last_group);
    last_group = group;
    ASSERT_EQ(first, next[static_cast<size_t>(group)]);
    ASSERT_GE(rows, 1);
    ASSERT_LE(rows, kTileRows);
    next[static_cast<size_t>(group)] += rows;
    // No tile is much smaller than the others, because the weights would then be read for few rows.
    ASSERT_GE(rows, std::min(counts[static_cast<size_t>(group)], kTileRows / 2 - 16)) << counts[static_cast<size_t>(group)];
  });
  EXPECT_EQ(next, counts);
}

// Because ranks are threads, a tile must not start other threads, and must restore its thread's OpenMP setting.
TEST(GemmThreads, TilesStayOnTheCallingThread) {
  expect_success_with({{"OMP_NUM_THREADS", "4"}, {"OMP_DYNAMIC", "false"}}, [] {
    const auto num_threads = [] {
      const std::filesystem::directory_iterator tasks("/proc/self/task");
      return std::distance(begin(tasks), end(tasks));
    };
    const auto omp_threads = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    const auto setting = [&] { return omp_threads == nullptr ? 4 : omp_threads(); };  // null: a oneDNN without OpenMP
    ASSERT_EQ(setting(), 4) << "the environment did not reach OpenMP: the test would show nothing";
    const auto before = num_threads();
    for (const WeightStorage storage : kStorages) {
      const std::vector<uint16_t> b(512 * 512), a(256 * 512);
      std::vector<float> c(256 * 512);
      TileGemm gemm(1, 512, 512, storage);
      if (storage == WeightStorage::packed) gemm.pack(0, b.data());
      gemm.bind(b.data());
      for (const int64_t m : {1, 64, 256}) gemm.tile(0, a.data(), m, c.data());
    }
    EXPECT_EQ(num_threads(), before);
    EXPECT_EQ(setting(), 4);
  });
}

// Limits oneDNN to various instruction sets: float32 kernels must take over and produce the same exact results.
class GemmIsa : public ::testing::TestWithParam<const char*> {};
TEST_P(GemmIsa, WidensWithoutBf16Kernels) {
  expect_success_with({{"DNNL_MAX_CPU_ISA", GetParam()}, {"ONEDNN_MAX_CPU_ISA", GetParam()}}, [] {
    for (const WeightStorage storage : kStorages) {
      EXPECT_EQ(TileGemm(1, 256, 256, storage).implementation().substr(0, 4), "f32 ");
      for (const Size size : kSizes) check_tiles(size, storage, {1, 12, 40});
      check_tiles({70, 16500}, storage, {2});
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Isa, GemmIsa, ::testing::Values("SSE41", "AVX2", "AVX512_CORE"));

}  // namespace
}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// ThreadSanitizer does not instrument compiled kernels, so tiles report their operands to it explicitly. Each test creates a
// race on one operand in a child process and expects ThreadSanitizer's report there; the same accesses in order must not
// produce one.
#if !defined(__SANITIZE_THREAD__)
#error "build this test with -fsanitize=thread only"
#endif

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "gemm/cpu/tile_gemm.hpp"
#include "switchyard/expert.hpp"

namespace switchyard::detail {
namespace {

constexpr int64_t kN = 48, kK = 80, kM = 8;

/// Runs `first`, then `second` on another thread that already exists. They are ordered in time, but only by a relaxed flag: the
/// memory model does not order them, so conflicting accesses are a race in every run. With `ordered`, the memory model orders
/// them.
void run_pair(bool ordered, const std::function<void()>& first, const std::function<void()>& second) {
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done.load(ordered ? std::memory_order_acquire : std::memory_order_relaxed)) std::this_thread::yield();
    second();
  });
  first();
  done.store(true, ordered ? std::memory_order_release : std::memory_order_relaxed);
  other.join();
}

bool failed(int status) { return WIFEXITED(status) && WEXITSTATUS(status) != 0; }

/// Expects a race report for the accesses that `plant(ordered)` makes in a child process.
template <class Plant>
void expect_race_report(Plant&& plant) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        plant(false);
        std::exit(0);
      },
      failed, "ThreadSanitizer: data race");
  EXPECT_EXIT(
      {
        plant(true);
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

struct Operands {
  std::vector<uint16_t> a = std::vector<uint16_t>(kM * kK, 0x3F80), b = std::vector<uint16_t>(2 * kN * kK, 0x3F80);
  std::vector<float> c = std::vector<float>(kM * kN);
  TileGemm gemm;
  explicit Operands(WeightStorage storage) : gemm(2, kN, kK, storage) {
    gemm.bind(b.data());
    for (int g = 0; g < 2 && storage == WeightStorage::packed; ++g) gemm.pack(g, b.data());
  }
  void tile() { gemm.tile(1, a.data(), kM, c.data()); }
};

class GemmRace : public ::testing::TestWithParam<WeightStorage> {};

TEST_P(GemmRace, RowsWrittenWhileATileReadsThem) {
  expect_race_report([storage = GetParam()](bool ordered) {
    Operands o(storage);
    run_pair(
        ordered, [&] { o.tile(); }, [&] { o.a.back() = 0; });
  });
}

TEST_P(GemmRace, TileReadsRowsThatWereNotPublished) {
  expect_race_report([storage = GetParam()](bool ordered) {
    Operands o(storage);
    run_pair(
        ordered, [&] { o.a[kK] = 0; }, [&] { o.tile(); });
  });
}

TEST_P(GemmRace, OutputReadBeforeItIsPublished) {
  expect_race_report([storage = GetParam()](bool ordered) {
    Operands o(storage);
    volatile float seen = 0;
    run_pair(
        ordered, [&] { o.tile(); }, [&] { seen = o.c.back(); });
  });
}

TEST_P(GemmRace, WeightsReplacedWhileATileReadsThem) {
  expect_race_report([storage = GetParam()](bool ordered) {
    Operands o(storage);
    run_pair(
        ordered, [&] { o.tile(); },
        [&] {
          if (storage == WeightStorage::packed) {
            o.gemm.pack(1, o.b.data());
          } else {
            o.b.back() = 0;
          }
        });
  });
}

// Tests one level higher: the rows that an expert call reads and writes, with and without padded copies.
TEST_P(GemmRace, ExpertRows) {
  for (const int64_t rows : {int64_t{4}, int64_t{5}}) {
    for (const bool input : {true, false}) {
      expect_race_report([storage = GetParam(), rows, input](bool ordered) {
        const ExpertShape shape{kK, kN, 1};
        std::vector<uint16_t> w13(2 * kN * kK, 0x3C00), w2(kN * kK, 0x3C00), x(5 * kK, 0x3F80), y(5 * kK);
        ExpertMlp mlp(shape, w13.data(), w2.data(), {.storage = storage});
        const int64_t first[] = {0}, count[] = {rows};
        volatile uint16_t seen = 0;
        const auto last = static_cast<size_t>(rows * kK - 1);
        run_pair(
            ordered, [&] { mlp.forward(x.data(), first, count, y.data()); },
            [&] {
              if (input) {
                x[last] = 0;
              } else {
                seen = y[last];
              }
            });
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Storage, GemmRace, ::testing::Values(WeightStorage::packed, WeightStorage::view),
                         [](const auto& storage) { return storage.param == WeightStorage::packed ? "packed" : "view"; });

}  // namespace
}  // namespace switchyard::detail

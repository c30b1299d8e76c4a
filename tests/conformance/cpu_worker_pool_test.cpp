// SPDX-License-Identifier: Apache-2.0
// CPU warps: the pool that runs them, their barrier, and the memory-order table of their flag ops.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "arch/cpu/cpu_arch.hpp"
#include "arch/cpu/worker_pool.hpp"
#include "layout/sites.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

struct Shape {
  int blocks;
  int warps;
};
class WorkerPools : public ::testing::TestWithParam<Shape> {};

INSTANTIATE_TEST_SUITE_P(Shapes, WorkerPools,
                         ::testing::Values(Shape{1, 1}, Shape{1, 2}, Shape{2, 1}, Shape{2, 3}, Shape{3, 5}, Shape{8, 6}),
                         [](const auto& param) {
                           return std::to_string(param.param.blocks) + "x" + std::to_string(param.param.warps);
                         });

TEST_P(WorkerPools, RunsEveryWarpOnceAndAgain) {
  const auto [blocks, warps] = GetParam();
  WorkerPool pool(blocks, warps);
  EXPECT_EQ(pool.total(), blocks * warps);
  std::vector<int> hits(static_cast<size_t>(pool.total()));
  const std::thread::id caller = std::this_thread::get_id();
  for (int call = 1; call <= 50; ++call) {
    pool.run([&](CpuWarp& w) {
      EXPECT_EQ(w.index(), w.block() * w.warps_per_block() + w.warp());
      EXPECT_EQ(w.total(), w.num_blocks() * w.warps_per_block());
      EXPECT_EQ(w.index() == 0, std::this_thread::get_id() == caller);
      ++hits[static_cast<size_t>(w.index())];
    });
    EXPECT_EQ(hits, std::vector<int>(hits.size(), call));
  }
}

// Uses plain memory deliberately: run() must order the caller's writes before the warps' accesses, and the warps' writes before
// its return (checked by ThreadSanitizer).
TEST_P(WorkerPools, OrdersMemoryAroundEachCall) {
  const auto [blocks, warps] = GetParam();
  WorkerPool pool(blocks, warps);
  std::vector<uint64_t> in(static_cast<size_t>(pool.total()));
  std::vector<uint64_t> out(in.size());
  for (uint64_t call = 0; call < 50; ++call) {
    std::iota(in.begin(), in.end(), call);
    pool.run([&](CpuWarp& w) { out[static_cast<size_t>(w.index())] = in[static_cast<size_t>(w.index())] * 2; });
    for (size_t i = 0; i < in.size(); ++i) ASSERT_EQ(out[i], 2 * (call + i));
  }
}

TEST_P(WorkerPools, BlockSyncOrdersTheWarpsOfABlock) {
  const auto [blocks, warps] = GetParam();
  WorkerPool pool(blocks, warps);
  std::vector<int> slots(static_cast<size_t>(pool.total()));
  pool.run([&](CpuWarp& w) {
    for (int round = 1; round <= 100; ++round) {
      slots[static_cast<size_t>(w.index())] = round;
      Cpu::block_sync(w);
      for (int i = 0; i < w.warps_per_block(); ++i) {
        ASSERT_EQ(slots[static_cast<size_t>(w.block() * w.warps_per_block() + i)], round);
      }
      Cpu::block_sync(w);
    }
  });
}

TEST_P(WorkerPools, RethrowTheLowestFailureAndStayUsable) {
  const auto [blocks, warps] = GetParam();
  WorkerPool pool(blocks, warps);
  for (int first = 0; first < pool.total(); ++first) {
    try {
      pool.run([&](CpuWarp& w) {
        if (w.index() >= first) throw std::runtime_error("warp " + std::to_string(w.index()));
      });
      FAIL() << "nothing thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "warp " + std::to_string(first));
    }
  }
  std::atomic<int> runs{0};
  pool.run([&](CpuWarp&) { ++runs; });
  EXPECT_EQ(runs.load(), pool.total());
}

TEST(WorkerPool, AFailedWarpReleasesThoseInBlockSync) {
  WorkerPool pool(2, 3);
  for (int culprit = 0; culprit < pool.total(); ++culprit) {
    try {
      pool.run([&](CpuWarp& w) {
        if (w.index() == culprit) throw std::logic_error("the cause");
        for (int i = 0; i < 3; ++i) Cpu::block_sync(w);
      });
      FAIL() << "nothing thrown";
    } catch (const std::exception& error) {
      EXPECT_STREQ(error.what(), "the cause") << "a broken barrier must not hide what broke it";
    }
  }
}

TEST(WorkerPool, AWarpThatReturnsLeavesTheBarrier) {
  WorkerPool pool(2, 4);
  std::atomic<int> passed{0};
  pool.run([&](CpuWarp& w) {
    for (int round = 0; round < 3; ++round) {
      if (w.warp() <= round) return;  // one warp fewer in each round
      Cpu::block_sync(w);
      ++passed;
    }
  });
  EXPECT_EQ(passed.load(), 2 * (3 + 2 + 1));
}

TEST(WorkerPool, DropsWhatABodyLeftPending) {
  WorkerPool pool(1, 2);
  std::vector<char> rows(256, 1);
  pool.run([&](CpuWarp& w) {
    if (w.warp() == 1) CpuDeferred::copy(w, &rows[0], &rows[128], 64);
  });
  std::fill(rows.begin(), rows.begin() + 128, char{7});
  pool.run([](CpuWarp& w) { CpuDeferred::settle(w); });
  EXPECT_EQ(std::count(rows.begin(), rows.begin() + 128, 7), 128) << "a copy of the previous call came back";
}

TEST(WorkerPool, TurnsOfSeveralCallers) {
  WorkerPool pool(1, 3);
  int inside = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int call = 0; call < 20; ++call) {
        pool.run([&](CpuWarp& w) {
          if (w.index() == 0) ++inside;
          Cpu::block_sync(w);
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(inside, 60);
}

TEST(WorkerPool, RejectsShapesOutsideItsContract) {
  for (const Shape shape : {Shape{0, 1}, Shape{1, 0}, Shape{-1, 2}, Shape{1, 1025}, Shape{1000, 1000}}) {
    try {
      WorkerPool pool(shape.blocks, shape.warps);
      FAIL() << shape.blocks << " x " << shape.warps;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(std::to_string(shape.blocks) + " x " + std::to_string(shape.warps)),
                std::string::npos)
          << error.what();
    }
  }
}

TEST(WorkerPool, ThreadsLeaveSignalsToTheApplication) {
  WorkerPool pool(1, 2);
  pool.run([](CpuWarp& w) {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    EXPECT_EQ(sigismember(&mask, SIGTERM), w.index() == 0 ? 0 : 1);
    EXPECT_EQ(sigismember(&mask, SIGSEGV), 0) << "a crash handler would not see the fault of a pool thread";
  });
}

TEST(WorkerPool, ScratchIsPrivateAlignedAndGrows) {
  WorkerPool pool(2, 2);
  std::set<std::byte*> seen;
  std::mutex mutex;
  for (const size_t bytes : {kDefaultScratchBytes, size_t{300001}}) {
    pool.reserve_scratch(bytes);
    seen.clear();
    pool.run([&](CpuWarp& w) {
      EXPECT_GE(w.scratch_bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(w.scratch()) % 64, 0u);
      std::memset(w.scratch(), w.index(), bytes);
      const std::lock_guard lock(mutex);
      seen.insert(w.scratch());
    });
    EXPECT_EQ(seen.size(), 4u);
  }
  pool.reserve_scratch(1);
  pool.run([](CpuWarp& w) { EXPECT_GE(w.scratch_bytes(), 300001u); });
}

// Eight ranks with six warps each share any small number of cores, with flags, block barriers and sleeping pools at the same
// time.
TEST(WorkerPool, ManyRanksShareFewCores) {
  constexpr int kRanks = 8;
  constexpr int kCalls = 20;
  std::vector<uint64_t> arrived(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      WorkerPool pool(2, 3);
      uint64_t ready = 0;
      for (uint64_t call = 1; call <= kCalls; ++call) {
        pool.run([&](CpuWarp& w) {
          Cpu::block_sync(w);
          const uint64_t before = Cpu::fetch_add<Scope::device>(w, &ready, 1, Site::local_sends);
          if (before + 1 == call * static_cast<uint64_t>(w.total())) {
            Cpu::store_release<Scope::system>(w, &arrived[static_cast<size_t>(rank)], flag_word(call), Site::barrier);
          }
          const auto flag = [&](int i) { return &arrived[static_cast<size_t>(i)]; };
          for (int polls = 0; Cpu::poll_from<Scope::system>(w, kRanks, flag, flag_word(call), Site::barrier) >= 0; ++polls) {
            Cpu::pause(w, polls);
          }
        });
      }
      EXPECT_EQ(ready, kCalls * 6u);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const uint64_t word : arrived) EXPECT_EQ(word, flag_word(kCalls));
}

#if defined(SWITCHYARD_MUTABLE_ORDERS)
TEST(OrderTable, WeakensOneSideOfOneSite) {
  reset_orders();
  EXPECT_EQ(acq_rel_order(Site::rows), std::memory_order_acq_rel);
  set_order(Site::rows, Side::acquire, std::memory_order_relaxed);
  EXPECT_EQ(acquire_order(Site::rows), std::memory_order_relaxed);
  EXPECT_EQ(release_order(Site::rows), std::memory_order_release);
  EXPECT_EQ(acq_rel_order(Site::rows), std::memory_order_release);
  EXPECT_EQ(acquire_order(Site::outputs), std::memory_order_acquire);
  set_order(Site::rows, Side::release, std::memory_order_relaxed);
  EXPECT_EQ(acq_rel_order(Site::rows), std::memory_order_relaxed);
  set_order(Site::rows, Side::acquire, std::memory_order_acquire);
  EXPECT_EQ(acq_rel_order(Site::rows), std::memory_order_acquire);
  reset_orders();
  EXPECT_EQ(release_order(Site::rows), std::memory_order_release);
}
#else
static_assert(acquire_order(Site::rows) == std::memory_order_acquire);
static_assert(release_order(Site::rows) == std::memory_order_release);
static_assert(acq_rel_order(Site::local_sends) == std::memory_order_acq_rel);
#endif

}  // namespace
}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// The symmetric heap in GPU memory: the same bytes through every mapping, the same errors on all ranks, and no leftovers.
#include "heap/gpu/cuda_heap.hpp"

#include <cuda.h>

#include <cstdio>
#include <cstdlib>

#include "gpu/harness/gpu_ranks.hpp"

namespace switchyard {
namespace {

using namespace detail;
using namespace test;

constexpr size_t kBytes = 4 * kMiB;
/// Memory that the driver may allocate for itself (page tables, pools) between two readings of free memory.
constexpr size_t kSlack = 24 * kMiB;

using Heap = std::unique_ptr<CudaHeap>;

Heap make_heap(const GpuRank& me, size_t bytes = kBytes) { return CudaHeap::create(me.link, bytes, me.device, kLong); }

uint32_t seed_of(int writer, int owner, int round = 0) { return static_cast<uint32_t>((round * 64 + writer) * 64 + owner); }

/// The slice of each segment that one writer fills: beyond the header, at an odd offset and with an odd size.
struct Slice {
  size_t offset, words;
};
Slice slice_of(const HeapView& view, int writer) {
  const size_t words_per_writer = (view.bytes - kHeapHeaderBytes) / static_cast<size_t>(view.world) / 4;
  return {kHeapHeaderBytes + static_cast<size_t>(writer) * words_per_writer * 4, words_per_writer};
}

void write_all(const HeapView& view, int round = 0) {
  const Slice mine = slice_of(view, view.rank);
  for (int owner = 0; owner < view.world; ++owner)
    write_pattern(view.base[owner] + mine.offset, mine.words, seed_of(view.rank, owner, round));
}

void check_all(const HeapView& view, int round = 0) {
  for (int owner = 0; owner < view.world; ++owner) {
    for (int writer = 0; writer < view.world; ++writer) {
      const Slice s = slice_of(view, writer);
      require_pattern(view.base[owner] + s.offset, s.words, seed_of(writer, owner, round),
                      "segment " + std::to_string(owner) + ", written by " + std::to_string(writer) + ", read by " +
                          std::to_string(view.rank));
    }
  }
}

// ---- memory is shared ----

class CudaHeapShares : public testing::TestWithParam<Setting> {};

TEST_P(CudaHeapShares, EveryRankWritesAndReadsEverySegment) {
  const Setting s = GetParam();
  run_gpu_ranks(s.as, s.world, s.kind, [&](const GpuRank& me) {
    Heap heap = make_heap(me, kBytes - 1000);
    const HeapView& view = heap->view();
    require(std::string(heap->kind()) == s.kind, std::string("kind is ") + s.kind);
    require(view.world == s.world && view.rank == me.rank() && heap->device() == me.device, "view");
    require(view.bytes == kBytes && heap->size() == kBytes, "size is rounded up");
    for (int r = 0; r < view.world; ++r) {
      require(reinterpret_cast<uintptr_t>(view.base[r]) % kHeapSegmentAlignment == 0, "alignment");
      require_zero(view.base[r], view.bytes, "new segment " + std::to_string(r));
    }
    me.meet();
    write_all(view);
    me.meet();
    check_all(view);
    require(heap->allocate(100, 2 * kMiB) == 2 * kMiB, "offset");
    me.meet();
  });
}

TEST_P(CudaHeapShares, CallersDeviceStaysCurrentAndNoErrorIsPending) {
  const Setting s = GetParam();
  run_gpu_ranks(s.as, s.world, s.kind, [&](const GpuRank& me) {
    const int other = device_of(me.rank() + 1);
    cuda(cudaSetDevice(other), "cudaSetDevice");
    const auto check_current = [&](const char* when) {
      int now = -1;
      cuda(cudaGetDevice(&now), "cudaGetDevice");
      require(now == other, std::string("the caller's device is current after ") + when);
      cuda(cudaGetLastError(), when);
    };
    Heap heap = make_heap(me);
    check_current("create");
    heap.reset();
    check_current("teardown");
  });
}

TEST_P(CudaHeapShares, NothingIsLeftAfterManyHeaps) {
  const Setting s = GetParam();
  run_gpu_ranks(s.as, s.world, s.kind, [&](const GpuRank& me) {
    constexpr size_t kLarge = 64 * kMiB;
    make_heap(me, kLarge).reset();  // triggers the driver's one-time allocations
    me.meet();
    const size_t free = free_bytes();
    const int fds = open_descriptors(me);
    for (int i = 0; i < 10; ++i) {
      Heap heap = make_heap(me, kLarge);
      me.meet();
      heap->close();
      heap->close();
    }
    me.meet();
    const size_t left = free_bytes();
    require(left + kSlack >= free, "free memory is " + std::to_string(left) + ", was " + std::to_string(free));
    const int fds_left = open_descriptors(me);
    require(fds_left == fds, std::to_string(fds_left) + " descriptors, were " + std::to_string(fds));
  });
}

INSTANTIATE_TEST_SUITE_P(Settings, CudaHeapShares,
                         testing::Values(Setting{As::processes, 1, "vmm"}, Setting{As::processes, 2, "vmm"},
                                         Setting{As::processes, 4, "vmm"}, Setting{As::processes, 1, "ipc"},
                                         Setting{As::processes, 2, "ipc"}, Setting{As::processes, 4, "ipc"},
                                         Setting{As::threads, 1, "vmm"}, Setting{As::threads, 2, "vmm"},
                                         Setting{As::threads, 4, "vmm"}, Setting{As::threads, 1, "ipc"},
                                         Setting{As::threads, 2, "ipc"}, Setting{As::threads, 4, "ipc"}),
                         name_of_setting);

TEST(CudaHeapInProcess, OneThreadMakesAllRanks) {
  for (const char* kind : {"vmm", "ipc"}) {
    for (const int world : {1, 2, 4}) {
      const auto ends = run_ranks(1, [&](ChildRank&) {
        ::setenv("SWITCHYARD_CUDA_HEAP", kind, 1);
        std::vector<int> devices;
        for (int r = 0; r < world; ++r) devices.push_back(device_of(r));
        auto heaps = CudaHeap::create_in_process(devices, kBytes);
        require(static_cast<int>(heaps.size()) == world, "number of heaps");
        for (const auto& heap : heaps) {
          require(heap->view().base[0] == heaps[0]->view().base[0], "one address per segment");
          for (int r = 0; r < world; ++r) require_zero(heap->view().base[r], kBytes, "new segment");
        }
        for (size_t r = 0; r < heaps.size(); ++r) {
          cuda(cudaSetDevice(devices[r]), "cudaSetDevice");
          write_all(heaps[r]->view());
        }
        for (size_t r = 0; r < heaps.size(); ++r) {
          cuda(cudaSetDevice(devices[r]), "cudaSetDevice");
          check_all(heaps[r]->view());
        }
        heaps.front().reset();  // the other ranks keep the segment alive
        if (world > 1) check_all(heaps.back()->view());
      });
      EXPECT_TRUE(ends[0].ok()) << kind << ", " << world << " ranks, " << ends[0];
    }
  }
}

/// A rank on the last GPU does not create a context on the first GPU.
TEST(CudaHeapInProcess, OtherGpusStayUntouched) {
  if (count_gpus() < 2) GTEST_SKIP() << "needs two GPUs";
  const auto ends = run_ranks(1, [&](ChildRank&) {
    int count = 0;
    cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    auto heaps = CudaHeap::create_in_process({count - 1}, kBytes);
    heaps.clear();
    void* entry = nullptr;
    cuda(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &entry, 12000, cudaEnableDefault, nullptr), "lookup");
    unsigned int flags = 0;
    int active = -1;
    const auto get_state = reinterpret_cast<decltype(&::cuDevicePrimaryCtxGetState)>(entry);
    require(get_state(0, &flags, &active) == CUDA_SUCCESS && active == 0, "GPU 0 has no context");
    require(get_state(count - 1, &flags, &active) == CUDA_SUCCESS && active == 1, "the last GPU has one");
  });
  EXPECT_TRUE(ends[0].ok()) << ends[0];
}

// ---- errors ----

TEST(CudaHeapErrors, OneRanksMistakeIsAnErrorOnAll) {
  for (const As as : {As::processes, As::threads}) {
    run_gpu_ranks(as, 2, nullptr, [](const GpuRank& me) {
      const bool wrong = me.rank() == 1;
      const auto create = [&](size_t bytes, int device) { (void)CudaHeap::create(me.link, bytes, device, kLong); };
      auto text = text_of_error(ErrorCode::invalid_argument, [&] { create(kBytes, wrong ? 99 : me.device); });
      require_contains(text, "rank 1");
      require_contains(text, "device = 99");
      text = text_of_error(ErrorCode::invalid_argument, [&] { create(wrong ? 0 : kBytes, me.device); });
      require_contains(text, "heap_bytes = 0");
      text = text_of_error(ErrorCode::mismatch, [&] { create(wrong ? kBytes : 2 * kBytes, me.device); });
      require_contains(text, std::to_string(2 * kBytes));
      Heap heap = make_heap(me);  // the ranks are still in step
      write_all(heap->view());
      me.meet();
      check_all(heap->view());
      me.meet();
    });
  }
}

TEST(CudaHeapErrors, TheEnvironmentDecidesTheKind) {
  struct Case {
    const char *first, *second, *expected;
  };
  for (const Case c : {Case{"auto", "ipc", "ipc"}, Case{"auto", "auto", "vmm"}, Case{"vmm", "auto", "vmm"}}) {
    run_gpu_ranks(As::processes, 2, nullptr, [&](const GpuRank& me) {
      ::setenv("SWITCHYARD_CUDA_HEAP", me.rank() == 0 ? c.first : c.second, 1);
      Heap heap = make_heap(me);
      require(std::string(heap->kind()) == c.expected, std::string("kind ") + heap->kind() + ", expected " + c.expected);
    });
  }
  run_gpu_ranks(As::processes, 2, nullptr, [&](const GpuRank& me) {
    ::setenv("SWITCHYARD_CUDA_HEAP", me.rank() == 0 ? "vmm" : "ipc", 1);
    text_of_error(ErrorCode::unsupported, [&] { make_heap(me); });
    ::setenv("SWITCHYARD_CUDA_HEAP", me.rank() == 0 ? "fast" : "ipc", 1);
    require_contains(text_of_error(ErrorCode::invalid_argument, [&] { make_heap(me); }), "'fast'");
  });
}

/// Only one rank runs out of memory: rank 1 on its own full GPU or, on a shared GPU, the second rank that allocates.
TEST(CudaHeapErrors, ExhaustionOnOneRank) {
  const bool shared = count_gpus() < 2;
  for (const char* kind : {"vmm", "ipc"}) {
    run_gpu_ranks(As::processes, 2, kind, [&](const GpuRank& me) {
      make_heap(me).reset();
      me.meet();
      const size_t free = free_bytes();
      size_t bytes = shared ? free / 10 * 6 : 2048 * kMiB;
      std::vector<size_t> all(2);
      me.link.all_gather(&bytes, sizeof bytes, all.data(), kLong);
      bytes = all[0];
      void* hog = nullptr;
      if (!shared && me.rank() == 1) cuda(cudaMalloc(&hog, free - 1024 * kMiB), "cudaMalloc of nearly everything");
      const std::string text = text_of_error(ErrorCode::system, [&] { make_heap(me, bytes); });
      require_contains(text, "has no room for");
      require_contains(text, "bytes are free");
      if (!shared) require_contains(text, "rank 1");
      if (hog != nullptr) cuda(cudaFree(hog), "cudaFree");
      me.meet();
      require(free_bytes() + kSlack >= free, "the rank that had memory has given it back");
      me.meet();
      Heap heap = make_heap(me);  // the ranks are still in step
      write_all(heap->view());
      me.meet();
      check_all(heap->view());
      me.meet();
    });
  }
}

// ---- a peer dies ----

/// With driver memory, the segment of a dead process stays usable, and teardown does not need other ranks.
TEST(CudaHeapPeerDies, OthersGoOnAndTearDown) {
  for (const char* kind : {"vmm", "ipc"}) {
    const std::string store = "unix:@switchyard-test-" + random_token();
    const bool vmm = std::string(kind) == "vmm";
    ForkedRanks ranks(3, [&](ChildRank& child) {
      ::setenv("SWITCHYARD_CUDA_HEAP", kind, 1);
      auto link = connect_processes({child.rank(), 3, store, "token"}, kLong);
      run_one(*link, [&](const GpuRank& me) {
        Heap heap = CudaHeap::create(me.link, kBytes, me.device, Milliseconds{10000});
        write_all(heap->view());
        me.meet();
        child.say("ready");
        child.await("go");
        if (vmm) check_all(heap->view());  // including the segment of the dead rank
        heap.reset();
        free_bytes();
      });
    });
    bool ready = true;
    for (int r = 0; r < 3; ++r) ready = ranks.wait_until_said(r, "ready", kLong) && ready;
    EXPECT_TRUE(ready);
    ranks.kill(2);
    EXPECT_TRUE(ranks.wait_until_ended(2, kLong));
    ranks.send(0, "go");
    ranks.send(1, "go");
    const auto ends = ranks.finish(kLong);
    EXPECT_TRUE(ends[0].ok()) << kind << ", " << ends[0];
    EXPECT_TRUE(ends[1].ok()) << kind << ", " << ends[1];
    EXPECT_EQ(ends[2].signal, SIGKILL);
  }
}

// ---- sleep and wake ----

class CudaHeapSleeps : public testing::TestWithParam<Setting> {};

void check_kept(const HeapView& view, const std::vector<CudaHeap::Range>& kept, int round) {
  for (int owner = 0; owner < view.world; ++owner) {
    size_t next = 0;
    for (const auto& [offset, bytes] : kept) {
      require_zero(view.base[owner] + next, offset - next, "what was not kept");
      require_pattern(view.base[owner] + offset, bytes / 4, seed_of(owner, static_cast<int>(offset % 61), round), "kept range");
      next = offset + bytes;
    }
    require_zero(view.base[owner] + next, view.bytes - next, "what was not kept");
  }
}

TEST_P(CudaHeapSleeps, MemoryGoesAndComesBackAtTheSameAddresses) {
  const Setting s = GetParam();
  run_gpu_ranks(s.as, s.world, s.kind, [&](const GpuRank& me) {
    constexpr size_t kLarge = 64 * kMiB;
    Heap heap = make_heap(me, kLarge);
    const HeapView view = heap->view();
    const std::vector<CudaHeap::Range> keep = {{4096, 400}, {kMiB + 4, 1000}, {kLarge - 8, 8}};
    for (int round = 0; round < 2; ++round) {
      fill_by_kernel(reinterpret_cast<uint32_t*>(view.base[view.rank]), kLarge / 4, 9999);
      for (const auto& [offset, bytes] : keep)
        write_pattern(view.base[view.rank] + offset, bytes / 4, seed_of(view.rank, static_cast<int>(offset % 61), round));
      me.meet();
      const size_t awake = free_bytes();
      me.meet();
      heap->sleep(me.link, keep, kLong);
      require(heap->asleep(), "asleep");
      const size_t asleep = free_bytes();
      require(asleep + kSlack >= awake + kLarge,
              "free while asleep: " + std::to_string(asleep) + ", awake: " + std::to_string(awake));
      text_of_error(ErrorCode::invalid_argument, [&] { heap->sleep(me.link, keep, kLong); });
      require(heap->allocate(64, 64) != 0, "offsets can be taken");
      me.meet();
      heap->wake(me.link, kLong);
      require(!heap->asleep(), "awake");
      text_of_error(ErrorCode::invalid_argument, [&] { heap->wake(me.link, kLong); });
      for (int r = 0; r < view.world; ++r) require(heap->view().base[r] == view.base[r], "same address");
      check_kept(view, keep, round);
      me.meet();
      write_all(view, round);
      me.meet();
      check_all(view, round);
      me.meet();
    }
    heap->sleep(me.link, {}, kLong);  // torn down while asleep
  });
}

/// On a full GPU, wake fails on all ranks; later it succeeds, and the kept content is intact.
TEST_P(CudaHeapSleeps, WakeCanBeTriedAgain) {
  const Setting s = GetParam();
  run_gpu_ranks(s.as, s.world, s.kind, [&](const GpuRank& me) {
    constexpr size_t kLarge = 1024 * kMiB;
    Heap heap = make_heap(me, kLarge);
    const HeapView view = heap->view();
    const std::vector<CudaHeap::Range> keep = {{8192, 4000}};
    write_pattern(view.base[view.rank] + 8192, 1000, seed_of(view.rank, 8192 % 61));
    const auto bad = text_of_error(ErrorCode::invalid_argument, [&] {
      const std::vector<CudaHeap::Range> beyond = {{kLarge - 4, me.rank() == s.world - 1 ? size_t{8} : size_t{4}}};
      heap->sleep(me.link, beyond, kLong);
    });
    require_contains(bad, "rank " + std::to_string(s.world - 1));
    heap->sleep(me.link, keep, kLong);
    void* hog = nullptr;
    me.meet();
    if (me.rank() == s.world - 1) cuda(cudaMalloc(&hog, free_bytes() - 512 * kMiB), "cudaMalloc of nearly everything");
    me.meet();
    require_contains(text_of_error(ErrorCode::system, [&] { heap->wake(me.link, kLong); }), "has no room for");
    require(heap->asleep(), "still asleep");
    if (hog != nullptr) cuda(cudaFree(hog), "cudaFree");
    me.meet();
    heap->wake(me.link, kLong);
    for (int r = 0; r < view.world; ++r)
      require_pattern(view.base[r] + 8192, 1000, seed_of(r, 8192 % 61), "kept range of rank " + std::to_string(r));
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Settings, CudaHeapSleeps,
                         testing::Values(Setting{As::processes, 1, "vmm"}, Setting{As::processes, 2, "vmm"},
                                         Setting{As::processes, 4, "vmm"}, Setting{As::threads, 1, "vmm"},
                                         Setting{As::threads, 2, "vmm"}, Setting{As::threads, 4, "vmm"}),
                         name_of_setting);

TEST(CudaHeapErrors, KindIpcDoesNotSleep) {
  for (const As as : {As::processes, As::threads}) {
    run_gpu_ranks(as, 2, "ipc", [](const GpuRank& me) {
      Heap heap = make_heap(me);
      text_of_error(ErrorCode::unsupported, [&] { heap->sleep(me.link, {}, kLong); });
      write_all(heap->view());
      me.meet();
      check_all(heap->view());
      me.meet();
    });
  }
}

}  // namespace
}  // namespace switchyard

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!testing::GTEST_FLAG(list_tests) && switchyard::test::count_gpus() == 0) {
    const char* const optional = std::getenv("SWITCHYARD_GPU_OPTIONAL");
    const bool skip = optional != nullptr && std::string(optional) == "1";
    std::printf(skip ? "SKIPPED: no GPU\n" : "FAILED: no GPU is visible (SWITCHYARD_GPU_OPTIONAL=1 allows that)\n");
    return skip ? 0 : 1;
  }
  return RUN_ALL_TESTS();
}

// SPDX-License-Identifier: Apache-2.0
// Symmetric heap with ranks as threads and as processes: the same object on all ranks, errors instead of signals, and no
// leftovers.
#include "heap/heap.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "launch/on_threads.hpp"
#include "heap/memory_limits.hpp"
#include "heap/segment.hpp"
#include "multiproc/fork_ranks.hpp"
#include "switchyard/status.hpp"

namespace switchyard {
namespace {

using namespace detail;
using test::ChildRank;
using test::ForkedRanks;
using test::RankEnd;
using test::run_ranks;

constexpr Milliseconds kMinute{60000};
constexpr size_t kMiB = size_t{1} << 20;

std::string new_store() { return "unix:@switchyard-test-" + random_token(); }

std::unique_ptr<Bootstrap> join(const ChildRank& me, const std::string& store) {
  return connect_processes({me.rank(), me.world(), store, "token"}, kMinute);
}

/// Returns the error code of `body` and, if `text` is given, the error text.
template <class Body>
ErrorCode error_of(const Body& body, std::string* text = nullptr) {
  try {
    body();
  } catch (const Error& error) {
    if (text != nullptr) *text = error.what();
    return error.code();
  }
  return ErrorCode::ok;
}

// ---- allocator ----

TEST(OffsetAllocator, FirstFitAndCoalescing) {
  OffsetAllocator allocator(4096, 4096 + 10 * 64);
  size_t at[5];
  for (size_t i = 0; i < 5; ++i) at[i] = allocator.allocate(100, 64).value();
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(at[i], 4096 + i * 128);
  EXPECT_FALSE(allocator.allocate(1, 1));
  allocator.release(at[1]);
  allocator.release(at[3]);
  EXPECT_EQ(allocator.usage().free, 256u);
  EXPECT_EQ(allocator.usage().largest_free, 128u);
  EXPECT_FALSE(allocator.allocate(129, 64)) << "two blocks that do not touch are not one";
  EXPECT_EQ(allocator.allocate(64, 64), at[1]) << "the first block that fits";
  allocator.release(at[1]);
  allocator.release(at[2]);  // merges with both neighbors
  EXPECT_EQ(allocator.usage().largest_free, 384u);
  EXPECT_EQ(allocator.allocate(384, 64), at[1]);
  for (const size_t i : {size_t{4}, size_t{0}, size_t{1}}) allocator.release(at[i]);
  const OffsetAllocator::Usage usage = allocator.usage();
  EXPECT_EQ(usage.used, 0u);
  EXPECT_EQ(usage.largest_free, usage.capacity);
}

TEST(OffsetAllocator, KeptPartsAreThoseOfBlocksInUse) {
  OffsetAllocator allocator(4096, 4096 + 10 * 64);
  const size_t a = allocator.allocate(100, 64, 100).value(), b = allocator.allocate(64, 64).value(),
               c = allocator.allocate(64, 64, 1000).value();
  EXPECT_EQ(allocator.kept(), (std::vector<HeapRange>{{a, 100}, {c, 64}})) << "no more than the block";
  allocator.release(a);
  allocator.release(b);
  EXPECT_EQ(allocator.kept(), (std::vector<HeapRange>{{c, 64}}));
  EXPECT_EQ(allocator.allocate(10, 64), a);
  EXPECT_EQ(allocator.kept(), (std::vector<HeapRange>{{c, 64}})) << "the block's next user keeps nothing";
}

TEST(OffsetAllocator, RandomCallsKeepBlocksDisjointAlignedAndCounted) {
  std::mt19937 random(7);
  constexpr size_t kBegin = 4096, kEnd = 1 << 20;
  OffsetAllocator allocator(kBegin, kEnd), twin(kBegin, kEnd);
  std::map<size_t, size_t> held;  // the oracle: offset -> requested bytes
  int failures = 0;
  for (int i = 0; i < 20000; ++i) {
    if (random() % 5 < 3) {
      const size_t bytes = random() % 9 == 0 ? random() % 200000 : random() % 3000;
      const size_t alignment = size_t{1} << random() % 15;
      const auto offset = allocator.allocate(bytes, alignment);
      ASSERT_EQ(offset, twin.allocate(bytes, alignment)) << "the same calls give the same offsets";
      if (!offset) {
        ++failures;
        continue;
      }
      ASSERT_EQ(*offset % alignment, 0u);
      ASSERT_GE(*offset, kBegin);
      ASSERT_LE(*offset + bytes, kEnd);
      const auto [place, fresh] = held.emplace(*offset, std::max<size_t>(bytes, 1));
      ASSERT_TRUE(fresh);
      if (place != held.begin()) {
        ASSERT_LE(std::prev(place)->first + std::prev(place)->second, *offset);
      }
      if (std::next(place) != held.end()) {
        ASSERT_LE(*offset + place->second, std::next(place)->first);
      }
    } else if (!held.empty()) {
      const auto victim = std::next(held.begin(), static_cast<std::ptrdiff_t>(random() % held.size()));
      allocator.release(victim->first);
      twin.release(victim->first);
      held.erase(victim);
    }
    const OffsetAllocator::Usage usage = allocator.usage();
    ASSERT_EQ(usage.used + usage.free, usage.capacity);
  }
  EXPECT_GT(failures, 0) << "the test never filled the allocator";
  for (const auto& [offset, bytes] : held) allocator.release(offset);
  EXPECT_EQ(allocator.usage().largest_free, kEnd - kBegin);
}

TEST(Heap, ExhaustionNamesAllSizes) {
  const auto heap = std::move(SymmetricHeap::create_in_process(1, kMiB)[0]);
  EXPECT_EQ(heap->size(), kMiB);
  heap->allocate(1000, 64);
  EXPECT_EQ(heap->used(), 1024u);
  std::string text;
  EXPECT_EQ(error_of([&] { heap->allocate(kMiB, 256); }, &text), ErrorCode::heap_exhausted);
  const std::string free = std::to_string(kMiB - 4096 - 1024);
  for (const std::string& part : {std::string("no room for 1048576 bytes"), free + " of 1048576 are free",
                                  "largest block has " + free, std::string("rank 0")}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
  EXPECT_EQ(error_of([&] { heap->allocate(SIZE_MAX, 64); }), ErrorCode::heap_exhausted);
  EXPECT_EQ(error_of([&] { heap->allocate(1, 3); }), ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([&] { heap->allocate(1, 0); }), ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([&] { heap->allocate(1, 2 * kHeapSegmentAlignment); }), ErrorCode::invalid_argument);
}

TEST(Heap, SizesAndWorldAreChecked) {
  EXPECT_EQ(error_of([] { SymmetricHeap::create_in_process(1, kHeapHeaderBytes); }), ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([] { SymmetricHeap::create_in_process(1, SIZE_MAX); }), ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([] { SymmetricHeap::create_in_process(0, kMiB); }), ErrorCode::invalid_argument);
  EXPECT_EQ(error_of([] { SymmetricHeap::create_in_process(65, kMiB); }), ErrorCode::invalid_argument);
  EXPECT_EQ(SymmetricHeap::create_in_process(1, kHeapHeaderBytes + 1)[0]->size(), kHeapHeaderBytes + page_bytes());
}

TEST(Heap, MoreThanTheMachineHasIsAnErrorThatNamesSizes) {
  std::string text;
  EXPECT_EQ(error_of([] { SymmetricHeap::create_in_process(4, size_t{1} << 44); }, &text), ErrorCode::system);
  EXPECT_NE(text.find("65536 GiB (4 ranks x 16384 GiB)"), std::string::npos) << text;
}

// ---- threads ----

/// Every rank writes one cell in every segment and checks all cells of its own segment. Also checks alignment and zero
/// initialization.
void exercise(Bootstrap& link, SymmetricHeap& heap) {
  const auto require = [](bool condition, const char* what) {
    if (!condition) throw std::runtime_error(what);
  };
  const HeapView& view = heap.view();
  require(view.world == link.world() && view.rank == link.rank() && view.bytes == heap.size(), "view");
  const size_t cells = static_cast<size_t>(link.world());
  const SymPtr<uint64_t> table{heap.allocate(cells * sizeof(uint64_t), 128)};
  const SymPtr<std::byte> wide{heap.allocate(1, kHeapSegmentAlignment)};
  for (int r = 0; r < view.world; ++r) {
    require(reinterpret_cast<uintptr_t>(view.base[r]) % kHeapSegmentAlignment == 0, "segments start aligned");
    require(reinterpret_cast<uintptr_t>(view.at(r, wide)) % kHeapSegmentAlignment == 0, "blocks are aligned in memory");
  }
  require(view.contains(view.local(table)) == true, "own memory is own");
  for (size_t i = 0; i < cells; ++i) require(view.local(table)[i] == 0, "fresh memory is zero");
  require(reinterpret_cast<HeapHeader*>(view.base[view.rank])->abort_word == 0, "no abort at first");
  link.barrier(kMinute);
  for (int r = 0; r < view.world; ++r) view.at(r, table)[view.rank] = static_cast<uint64_t>(view.rank * 1000 + r);
  view.base[(view.rank + 1) % view.world][heap.size() - 1] = std::byte{77};  // the last byte exists
  link.barrier(kMinute);
  for (int r = 0; r < view.world; ++r) {
    require(view.local(table)[r] == static_cast<uint64_t>(r * 1000 + view.rank), "what the peer wrote");
  }
  require(view.base[view.rank][heap.size() - 1] == std::byte{77}, "last byte");
  link.barrier(kMinute);
}

class Worlds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Heap, Worlds, testing::Values(1, 2, 3, 8));

TEST_P(Worlds, ThreadsShareTheirSegments) {
  auto links = make_thread_bootstraps(GetParam());
  std::vector<std::string> errors(links.size());
  launch::on_threads(links.size(), [&](size_t r) {
    try {
      const auto heap = SymmetricHeap::create(*links[r], 8 * kMiB, kMinute);
      exercise(*links[r], *heap);
    } catch (const std::exception& error) {
      errors[r] = error.what();
      links[r]->leave();
    }
  });
  for (size_t r = 0; r < errors.size(); ++r) EXPECT_EQ(errors[r], "") << "rank " << r;
}

TEST(Heap, ASegmentLivesAsLongAsAnyRankOfTheProcess) {
  auto heaps = SymmetricHeap::create_in_process(3, kMiB);
  const SymPtr<int> cell{heaps[2]->allocate(4, 4)};
  *heaps[2]->view().local(cell) = 42;
  heaps[2].reset();
  heaps[0].reset();
  EXPECT_EQ(*heaps[1]->view().at(2, cell), 42);
}

TEST(Heap, DifferentSizesAreAMismatchOnEveryRank) {
  auto links = make_thread_bootstraps(3);
  std::atomic<int> mismatches{0};
  launch::on_threads(links.size(), [&](size_t r) {
    mismatches += error_of([&] { SymmetricHeap::create(*links[r], (r == 1 ? 2 : 1) * kMiB, kMinute); }) == ErrorCode::mismatch;
  });
  EXPECT_EQ(mismatches, 3);
}

TEST(Heap, AForkDoesNotInheritTheSegments) {
  const auto heap = std::move(SymmetricHeap::create_in_process(1, kMiB)[0]);
  *heap->view().base[0] = std::byte{1};
  const auto ends = run_ranks(1, [&](ChildRank& me) {
    unsigned char resident = 0;
    const int result = ::mincore(heap->view().base[0], page_bytes(), &resident);
    me.require(result == -1 && errno == ENOMEM, "the address is not mapped in a child");
  });
  EXPECT_TRUE(ends[0].ok()) << ends[0];
}

// ---- processes ----

/// Number of segment mappings in a process, or -1 if the process does not exist.
int mapped_segments(pid_t pid) {
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  if (!maps) return -1;
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:switchyard-heap") != std::string::npos;
  return count;
}

std::set<std::string> list(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}
size_t open_descriptors() { return list("/proc/self/fd").size(); }

TEST_P(Worlds, ProcessesShareTheirSegments) {
  const std::string store = new_store();
  const auto shm_before = list("/dev/shm");
  const auto ends = run_ranks(GetParam(), [&](ChildRank& me) {
    const auto link = join(me, store);
    const size_t descriptors = open_descriptors();
    {
      const auto heap = SymmetricHeap::create(*link, 8 * kMiB, kMinute);
      me.require(open_descriptors() == descriptors, "the segments hold no descriptors");
      me.require(mapped_segments(::getpid()) == me.world(), "each segment is mapped once");
      exercise(*link, *heap);
      // Atomics work across the mappings.
      const SymPtr<uint64_t> counter{heap->allocate(8, 8)};
      for (int i = 0; i < 1000; ++i) std::atomic_ref(*heap->view().at(0, counter)).fetch_add(1);
      link->barrier(kMinute);
      me.require(*heap->view().at(0, counter) == static_cast<uint64_t>(1000 * me.world()), "atomic sum");
      link->barrier(kMinute);
      if (me.rank() == 0) link->leave();  // leaving is not collective
    }
    me.require(mapped_segments(::getpid()) == 0, "nothing is mapped any more");
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(end.ok()) << end;
  EXPECT_EQ(list("/dev/shm"), shm_before);
}

TEST(HeapOfProcesses, OutlivesAKilledRankAndDisappearsWithTheLastOne) {
  const std::string store = new_store();
  const auto shm_before = list("/dev/shm");
  ForkedRanks ranks(3, [&](ChildRank& me) {
    const auto link = join(me, store);
    const auto heap = SymmetricHeap::create(*link, 4 * kMiB, kMinute);
    const SymPtr<uint64_t> cell{heap->allocate(32, 8)};
    *heap->view().local(cell) = static_cast<uint64_t>(100 + me.rank());
    link->barrier(kMinute);
    me.say("mapped");
    me.await("rank 1 is dead");
    me.require(*heap->view().at(1, cell) == 101, "the dead rank's memory is still there");
    *heap->view().at(1, cell + 1 + me.rank()) = 7;  // and is writable: no signal
    me.say("touched");
    me.await("never");
  });
  std::vector<pid_t> pids;
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(ranks.wait_until_said(r, "mapped", kMinute));
    pids.push_back(ranks.pid(r));
    EXPECT_EQ(mapped_segments(pids.back()), 3);
  }
  ranks.kill(1);
  ASSERT_TRUE(ranks.wait_until_ended(1, kMinute));
  ranks.send_to_all("rank 1 is dead");
  for (const int r : {0, 2}) ASSERT_TRUE(ranks.wait_until_said(r, "touched", kMinute));
  ranks.kill(0);
  ranks.kill(2);
  ranks.finish(kMinute);
  for (const pid_t pid : pids) EXPECT_LE(mapped_segments(pid), 0);
  EXPECT_EQ(list("/dev/shm"), shm_before);
}

TEST(HeapOfProcesses, OneRankWithoutRoomIsAnErrorOnAllThatNamesIt) {
  const std::string store = new_store();
  const auto ends = run_ranks(3, [&](ChildRank& me) {
    const auto link = join(me, store);
    if (me.rank() == 1) {
      const rlimit small = {kMiB, kMiB};  // exceeding it would raise SIGXFSZ if the library did not check the limit
      me.require(::setrlimit(RLIMIT_FSIZE, &small) == 0, "setrlimit");
    }
    std::string text;
    const ErrorCode code = error_of([&] { SymmetricHeap::create(*link, 4 * kMiB, kMinute); }, &text);
    me.require(code == ErrorCode::system, "code of: " + text);
    me.require(text.find("rank 1") != std::string::npos && text.find("4 MiB") != std::string::npos &&
                   text.find("file size limit is 1 MiB") != std::string::npos,
               "text: " + text);
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(end.ok()) << end;
}

TEST(HeapOfProcesses, MoreThanTheMachineHasIsAnErrorBeforeAnyMemoryIsTaken) {
  const std::string store = new_store();
  const auto ends = run_ranks(2, [&](ChildRank& me) {
    const auto link = join(me, store);
    std::string text;
    const ErrorCode code = error_of([&] { SymmetricHeap::create(*link, size_t{1} << 44, kMinute); }, &text);
    me.require(code == ErrorCode::system && text.find("32768 GiB (2 ranks x 16384 GiB)") != std::string::npos, text);
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(end.ok()) << end;
}

TEST(HeapOfProcesses, ADeadRankEndsTheCreationOfTheOthers) {
  const std::string store = new_store();
  ForkedRanks ranks(3, [&](ChildRank& me) {
    const auto link = join(me, store);
    me.say("joined");
    if (me.rank() == 2) me.await("never");
    const ErrorCode code = error_of([&] { SymmetricHeap::create(*link, kMiB, kMinute); });
    me.require(code == ErrorCode::peer_failed, "code " + std::string(to_string(code)));
  });
  for (int r = 0; r < 3; ++r) ASSERT_TRUE(ranks.wait_until_said(r, "joined", kMinute));
  ranks.kill(2);
  const auto ends = ranks.finish(kMinute);
  for (const size_t r : {0, 1}) EXPECT_TRUE(ends[r].ok()) << ends[r];
}

// ---- segments ----

TEST(Segment, CannotBeResizedByAnyone) {
  const UniqueFd fd = create_segment_fd(kMiB);
  EXPECT_EQ(::ftruncate(fd.get(), 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(fd.get(), 2 * kMiB), -1);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), -1) << "nor made read-only";
  struct stat info;
  ASSERT_EQ(::fstat(fd.get(), &info), 0);
  EXPECT_EQ(static_cast<size_t>(info.st_blocks) * 512, kMiB) << "every page is committed";
  EXPECT_EQ(info.st_nlink, 0u) << "it has a name";
}

TEST(Segment, SignalsDoNotStarveIt) {
  const size_t page = page_bytes(), bytes = 1000 * page + 1;
  size_t done = 0;
  int calls = 0;
  // Simulates a timer: a step that takes longer than the timer's period is undone.
  const auto timer = [&](size_t longest) {
    done = 0;
    calls = 0;
    return in_parts(bytes, [&, longest](size_t offset, size_t part) {
      EXPECT_EQ(offset, done);
      ++calls;
      if (part > longest) return EINTR;
      done += part;
      return 0;
    });
  };
  for (const size_t longest : {bytes, 100 * page, page}) {
    EXPECT_EQ(timer(longest), 0);
    EXPECT_EQ(done, bytes);
    EXPECT_LT(calls, 1100);
  }
  EXPECT_EQ(timer(page - 1), EINTR) << "bounded";
  EXPECT_LT(calls, 100000);
  EXPECT_EQ(in_parts(bytes, [](size_t, size_t) { return ENOSPC; }), ENOSPC);

  // A real timer.
  struct sigaction before {
  }, ignore{};
  ignore.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGALRM, &ignore, &before), 0);
  const itimerval often = {{0, 2000}, {0, 2000}}, never = {};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
  const UniqueFd fd = create_segment_fd(256 * kMiB);
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  EXPECT_TRUE(fd);
}

TEST(Segment, AnotherFileIsRefused) {
  std::string text;
  const UniqueFd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), static_cast<off_t>(kMiB)), 0);
  EXPECT_EQ(error_of([&] { Mapping::shared(unsealed.get(), kMiB); }, &text), ErrorCode::system);
  EXPECT_NE(text.find("not sealed"), std::string::npos) << text;
  const UniqueFd fd = create_segment_fd(kMiB);
  EXPECT_EQ(error_of([&] { Mapping::shared(fd.get(), 2 * kMiB); }, &text), ErrorCode::system);
  EXPECT_NE(text.find("1048576 bytes instead of 2097152"), std::string::npos) << text;
}

}  // namespace
}  // namespace switchyard

// SPDX-License-Identifier: Apache-2.0
// The heap releases its memory and allocates it again, with ranks as threads and as processes: kept, discarded and resident
// parts.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <thread>

#include "launch/on_threads.hpp"
#include "heap/heap.hpp"
#include "heap/segment.hpp"
#include "multiproc/fork_ranks.hpp"
#include "switchyard/status.hpp"

namespace switchyard {
namespace {

using namespace detail;
using test::ChildRank;
using test::RankEnd;
using test::run_ranks;

constexpr Milliseconds kLong{60000};
constexpr size_t kHeapBytes = size_t{2} << 20, kPart = kHeapBytes / 4, kPool = kHeapBytes / 4;

/// Expects `body` to throw Error(invalid_argument) with a text that contains `part`.
template <class Body>
void expect_invalid(const std::string& part, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    ChildRank::require(error.code() == ErrorCode::invalid_argument && std::string(error.what()).find(part) != std::string::npos,
                       "'" + part + "' is in: " + error.what());
    return;
  }
  ChildRank::require(false, "an error with '" + part + "'");
}

/// Fills the words of a segment starting at `first`, each with a different value.
void fill(const HeapView& view, int owner, size_t first, size_t end, uint64_t seed) {
  for (size_t at = first; at < end; at += 8) *reinterpret_cast<uint64_t*>(view.base[owner] + at) = seed + at;
}
void require_filled(const HeapView& view, int owner, size_t first, size_t end, uint64_t seed, const std::string& what) {
  for (size_t at = first; at < end; at += 8)
    if (*reinterpret_cast<const uint64_t*>(view.base[owner] + at) != (seed == 0 ? 0 : seed + at))
      ChildRank::require(false, what + " of rank " + std::to_string(owner) + " at " + std::to_string(at));
}

/// Number of bytes in a segment that the system may convert to huge pages on its own, whatever their content (mappings with the
/// flag "hg").
size_t bytes_for_huge_pages(const std::byte* base, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(base), last = first + bytes;
  std::ifstream maps("/proc/self/smaps");
  uintptr_t begin = 0, end = 0;
  size_t sum = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.rfind("VmFlags:", 0) == 0) {
      if (begin < last && end > first && line.find(" hg") != std::string::npos)
        sum += std::min(end, last) - std::max(begin, first);
      continue;
    }
    std::istringstream words(line);
    uintptr_t from = 0, to = 0;
    char dash = 0;
    if (words >> std::hex >> from >> dash >> to && dash == '-') begin = from, end = to;
  }
  return sum;
}

/// Tests kept ranges that begin and end inside pages, in blocks and in a pool. All other bytes are zero after wake, on all
/// ranks.
void nap(Bootstrap& link, SymmetricHeap& heap, uint64_t seed) {
  const HeapView& view = heap.view();
  const size_t whole = heap.allocate(10000, 64), part = heap.allocate(kPart, 4096, 8200), none = heap.allocate(kPool, 64, 0);
  const auto pool = std::make_shared<OffsetAllocator>(none, none + kPool);
  heap.add_pool(none, pool);
  const size_t inner = pool->allocate(5000, 128, 5000).value(), lost = pool->allocate(300000, 128).value();
  const std::vector<HeapRange> kept = {{0, kHeapHeaderBytes}, {whole, 10000}, {part, 8200}, {inner, 5000}};
  ChildRank::require(heap.kept() == kept, "what is kept");
  for (int round = 0; round < 2; ++round, seed += 1000000) {
    const auto mine = seed + static_cast<uint64_t>(link.rank()) * 10;
    for (const auto& [at, bytes] : {HeapRange{whole, 10000}, {part, kPart}, {none, kPool}})
      fill(view, link.rank(), at, at + bytes, mine);
    link.barrier(kLong);
    heap.sleep(link, heap.kept(), kLong);
    ChildRank::require(heap.asleep(), "asleep");
    link.barrier(kLong);
    // The header stays available because ranks may have to report a failure.
    auto* const header = reinterpret_cast<HeapHeader*>(view.base[(link.rank() + 1) % link.world()]);
    ChildRank::require(header->abort_word == 0, "the header can be read");
    std::vector<unsigned char> pages(view.bytes / page_bytes());
    ChildRank::require(::mincore(view.base[link.rank()], view.bytes, pages.data()) == 0, "mincore");
    const auto resident = std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) != 0; });
    ChildRank::require(resident >= 1 && resident <= 16, std::to_string(resident) + " pages are resident");
    ChildRank::require(bytes_for_huge_pages(view.base[link.rank()], view.bytes) <= 16 * page_bytes(), "memory stays away");
    link.barrier(kLong);
    heap.wake(link, kLong);
    for (int r = 0; r < link.world(); ++r) {
      const auto theirs = seed + static_cast<uint64_t>(r) * 10;
      require_filled(view, r, whole, whole + 10000, theirs, "a block that is kept");
      require_filled(view, r, part, part + 8200, theirs, "the kept part of a block");
      require_filled(view, r, part + 16384, part + kPart, 0, "the rest of a block");
      require_filled(view, r, inner, inner + 5000, theirs, "a block of a pool that is kept");
      require_filled(view, r, (lost + 8191) / 4096 * 4096, none + kPool - 4096, 0, "the rest of a pool");
    }
    link.barrier(kLong);
  }
  heap.release(none);
  heap.release(part);
  heap.release(whole);
  ChildRank::require(heap.kept().size() == 1, "nothing is kept but the header");
}

class HeapSleep : public testing::TestWithParam<int> {};

TEST_P(HeapSleep, GivesMemoryBackAndKeepsWhatItWasTold) {
  const std::string store = "unix:@switchyard-test-" + random_token();
  const auto ends = run_ranks(GetParam(), [&](ChildRank& me) {
    const auto link = connect_processes({me.rank(), me.world(), store, "token"}, kLong);
    const auto heap = SymmetricHeap::create(*link, kHeapBytes, kLong);
    nap(*link, *heap, 1);
    expect_invalid("wake: the heap does not sleep", [&] { heap->wake(*link, kLong); });
    const HeapRange beyond[] = {{heap->size() - 8, 16}};
    expect_invalid("must lie within the segment", [&] { heap->sleep(*link, beyond, kLong); });
    heap->sleep(*link, heap->kept(), kLong);
    expect_invalid("sleep: the heap sleeps already", [&] { heap->sleep(*link, {}, kLong); });
    heap->wake(*link, kLong);
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(end.ok()) << end;
  const auto threads = run_ranks(1, [&](ChildRank&) {
    auto links = make_thread_bootstraps(GetParam());
    auto heaps = SymmetricHeap::create_in_process(GetParam(), kHeapBytes);
    std::vector<std::exception_ptr> errors(links.size());
    launch::on_threads(links.size(), [&](size_t r) {
      try {
        nap(*links[r], *heaps[r], 5);
      } catch (...) {
        errors[r] = std::current_exception();
      }
      links[r]->leave();
    });
    for (const auto& error : errors)
      if (error) std::rethrow_exception(error);
  });
  EXPECT_TRUE(threads[0].ok()) << threads[0];
}

INSTANTIATE_TEST_SUITE_P(Worlds, HeapSleep, testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace switchyard

// SPDX-License-Identifier: Apache-2.0
#include "heap/heap.hpp"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <string>

#include "bootstrap/deadline.hpp"
#include "heap/collective_step.hpp"
#include "heap/memory_limits.hpp"
#include "heap/segment.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

using Segments = std::vector<std::shared_ptr<Mapping>>;

constexpr const char* kSubject = "symmetric heap";

class MappedHeap final : public SymmetricHeap {
 public:
  MappedHeap(const HeapView& view, Segments segments)
      : SymmetricHeap(view, static_cast<size_t>(view.bytes)), segments_(std::move(segments)) {}
  void sleep(Bootstrap& bootstrap, std::span<const Range> keep, Milliseconds budget) override;
  void wake(Bootstrap& bootstrap, Milliseconds budget) override;
  HeapHeader* header(int r) const noexcept override {
    const auto& segment = segments_[static_cast<size_t>(r)];
    return segment ? reinterpret_cast<HeapHeader*>(segment->data()) : nullptr;
  }

 private:
  Mapping& mine() const { return *segments_[static_cast<size_t>(view().rank)]; }

  Segments segments_;        // includes threads of other hosts, for their headers
  std::vector<Range> away_;  // whole pages of this rank's segment, returned to the system
};

std::unique_ptr<SymmetricHeap> make_heap(int rank, const HostMap& hosts, size_t bytes, Segments segments) {
  HeapView view;
  for (const int r : hosts.ranks_of(hosts.host_of(rank))) view.base[r] = segments[static_cast<size_t>(r)]->data();
  view.bytes = bytes;
  view.rank = rank;
  view.world = static_cast<int>(segments.size());
  return std::make_unique<MappedHeap>(view, std::move(segments));
}

size_t whole_pages(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

size_t checked_segment_bytes(size_t bytes) {
  constexpr size_t kLargest = size_t{1} << 46;
  if (bytes <= kHeapHeaderBytes || bytes > kLargest) {
    throw Error(ErrorCode::invalid_argument,
                "heap_bytes = " + std::to_string(bytes) + ": must be more than " + std::to_string(kHeapHeaderBytes) +
                    " (the header) and at most " + std::to_string(kLargest),
                "heap_bytes");
  }
  return whole_pages(bytes, page_bytes());
}

void check_memory(int world, uint64_t needed, uint64_t available, const std::string& limit) {
  if (needed <= available) return;
  throw AgreedError(ErrorCode::system, "the symmetric heap needs " + describe_bytes(needed) + " (" + std::to_string(world) +
                                           " ranks x " + describe_bytes(needed / static_cast<uint64_t>(world)) + ") but only " +
                                           describe_bytes(available) + " can still be used (" + limit + "): lower heap_bytes");
}

/// The size that a rank requests, and the rank's estimate of available memory.
struct Proposal {
  uint64_t bytes;
  uint64_t available;
  char limit[112];
};

/// Gathers the proposals of all ranks before any rank allocates. Throws on all ranks if any host has too little memory.
std::vector<Proposal> agree_on_memory(Bootstrap& bootstrap, size_t bytes, const Deadline& deadline) {
  const MemoryAvailable available = memory_available();
  Proposal mine = {bytes, available.bytes, {}};
  std::snprintf(mine.limit, sizeof mine.limit, "%s", available.limit.c_str());
  std::vector<Proposal> all = bootstrap.gather(mine, deadline.remaining());
  for (int host = 0; host < bootstrap.host_map().hosts(); ++host) {
    const std::vector<int>& ranks = bootstrap.host_map().ranks_of(host);
    Proposal* least = &all[static_cast<size_t>(ranks.front())];
    uint64_t needed = 0;
    for (const int r : ranks) {
      Proposal& proposal = all[static_cast<size_t>(r)];
      needed += proposal.bytes;
      if (proposal.available < least->available) least = &proposal;
    }
    least->limit[sizeof least->limit - 1] = '\0';
    check_memory(static_cast<int>(ranks.size()), needed, least->available, least->limit);
  }
  return all;
}

/// Whole pages of [0, bytes) that lie between the ranges.
std::vector<HeapRange> pages_between(std::span<const HeapRange> ranges, size_t bytes) {
  const size_t page = page_bytes();
  std::vector<HeapRange> between;
  size_t at = 0;
  const auto up_to = [&](size_t end) {
    const size_t first = whole_pages(at, page), last = end / page * page;
    if (first < last) between.emplace_back(first, last - first);
  };
  for (const auto& [offset, length] : ranges) {
    if (offset > at) up_to(offset);
    at = std::max(at, offset + length);
  }
  up_to(bytes);
  return between;
}

Segments share_in_process(Bootstrap& bootstrap, size_t bytes, const Deadline& deadline) {
  std::shared_ptr<Mapping> mine;
  run_step(bootstrap, deadline, kSubject, [&] { mine = Mapping::anonymous(bytes); });
  Segments segments;
  for (auto& object : bootstrap.exchange_objects(mine, deadline.remaining())) {
    segments.push_back(std::static_pointer_cast<Mapping>(object));
  }
  return segments;
}

Segments share_by_descriptor(Bootstrap& bootstrap, size_t bytes, const Deadline& deadline) {
  UniqueFd mine;
  run_step(bootstrap, deadline, kSubject, [&] { mine = create_segment_fd(bytes); });
  const std::vector<UniqueFd> fds = bootstrap.exchange_fds(mine.get(), deadline.remaining());
  Segments segments;
  run_step(bootstrap, deadline, kSubject, [&] {
    for (const UniqueFd& fd : fds) segments.push_back(fd ? Mapping::shared(fd.get(), bytes) : nullptr);
  });
  return segments;
}

void MappedHeap::sleep(Bootstrap& bootstrap, std::span<const Range> keep, Milliseconds budget) {
  const Deadline deadline(budget);
  run_step(bootstrap, deadline, kSubject, [&] {
    check_keep(keep);
    mine().check_can_discard();
    away_ = pages_between(keep, size());
  });
  asleep_ = true;
  run_step(bootstrap, deadline, kSubject, [&] {
    for (const auto& [offset, bytes] : away_) mine().discard(offset, bytes);
  });
}

void MappedHeap::wake(Bootstrap& bootstrap, Milliseconds budget) {
  const Deadline deadline(budget);
  size_t bytes = 0;
  run_step(bootstrap, deadline, kSubject, [&] {
    if (!asleep_) throw Error(ErrorCode::invalid_argument, "wake: the heap does not sleep");
    for (const Range& range : away_) bytes += range.second;
  });
  (void)agree_on_memory(bootstrap, bytes, deadline);
  try {
    run_step(bootstrap, deadline, kSubject, [&] {
      for (const auto& [offset, length] : away_) mine().commit(offset, length);
    });
  } catch (...) {
    for (const auto& [offset, length] : away_) {
      try {
        mine().discard(offset, length);
      } catch (const Error&) {
        // The memory stays committed; the next attempt handles this.
      }
    }
    throw;
  }
  away_.clear();
  asleep_ = false;
}

}  // namespace

std::unique_ptr<SymmetricHeap> SymmetricHeap::create(Bootstrap& bootstrap, size_t bytes, Milliseconds budget) {
  const Deadline deadline(budget);
  size_t segment_bytes = 0;
  run_step(bootstrap, deadline, kSubject, [&] { segment_bytes = checked_segment_bytes(bytes); });
  const std::vector<Proposal> proposals = agree_on_memory(bootstrap, segment_bytes, deadline);
  for (size_t r = 0; r < proposals.size(); ++r) {
    if (proposals[r].bytes == proposals[0].bytes) continue;
    throw Error(ErrorCode::mismatch, "heap_bytes differs: rank 0 asks for " + std::to_string(proposals[0].bytes) +
                                         " and rank " + std::to_string(r) + " for " + std::to_string(proposals[r].bytes) +
                                         "; all ranks must pass the same size");
  }
  Segments segments = bootstrap.same_process() ? share_in_process(bootstrap, segment_bytes, deadline)
                                               : share_by_descriptor(bootstrap, segment_bytes, deadline);
  return make_heap(bootstrap.rank(), bootstrap.host_map(), segment_bytes, std::move(segments));
}

std::vector<std::unique_ptr<SymmetricHeap>> SymmetricHeap::create_in_process(const HostMap& hosts, size_t bytes) {
  const int world = hosts.world();
  if (world < 1 || world > kMaxRanks) {
    throw Error(ErrorCode::invalid_argument,
                "world = " + std::to_string(world) + ": must be from 1 to " + std::to_string(kMaxRanks));
  }
  const size_t segment_bytes = checked_segment_bytes(bytes);
  const MemoryAvailable available = memory_available();
  check_memory(world, static_cast<uint64_t>(world) * segment_bytes, available.bytes, available.limit);
  Segments segments;
  for (int r = 0; r < world; ++r) segments.push_back(Mapping::anonymous(segment_bytes));
  std::vector<std::unique_ptr<SymmetricHeap>> heaps;
  for (int r = 0; r < world; ++r) heaps.push_back(make_heap(r, hosts, segment_bytes, segments));
  return heaps;
}

SymmetricHeap::SymmetricHeap(const HeapView& view, size_t size)
    : view_(view), size_(size), allocator_(kHeapHeaderBytes, size) {}

size_t SymmetricHeap::used() const { return allocator_.usage().used; }

std::vector<SymmetricHeap::Range> SymmetricHeap::kept() const {
  std::vector<Range> all = {{0, kHeapHeaderBytes}};
  const auto add = [&](const std::vector<Range>& ranges) { all.insert(all.end(), ranges.begin(), ranges.end()); };
  add(allocator_.kept());
  const std::lock_guard lock(mutex_);
  for (const auto& [offset, pool] : pools_)
    if (const auto alive = pool.lock()) add(alive->kept());
  std::sort(all.begin(), all.end());
  return all;
}

void SymmetricHeap::check_keep(std::span<const Range> keep) const {
  if (asleep_) throw Error(ErrorCode::invalid_argument, "sleep: the heap sleeps already");
  for (const auto& [offset, bytes] : keep) {
    if (offset <= size_ && bytes <= size_ - offset) continue;
    throw Error(ErrorCode::invalid_argument, "keep: range of " + std::to_string(bytes) + " bytes at offset " +
                                                 std::to_string(offset) + ": must lie within the segment of " +
                                                 std::to_string(size_) + " bytes");
  }
}

void SymmetricHeap::add_pool(size_t offset, std::weak_ptr<const KeepsRanges> pool) {
  const std::lock_guard lock(mutex_);
  pools_.emplace_back(offset, std::move(pool));
}

size_t SymmetricHeap::allocate(size_t bytes, size_t alignment, size_t kept, size_t at_least) {
  if (!std::has_single_bit(alignment) || alignment > kHeapSegmentAlignment) {
    throw Error(ErrorCode::invalid_argument, "heap alignment = " + std::to_string(alignment) +
                                                 ": must be a power of two up to " + std::to_string(kHeapSegmentAlignment));
  }
  if (const auto offset = allocator_.allocate(bytes, alignment, std::min(kept, bytes), at_least)) return *offset;
  const OffsetAllocator::Usage usage = allocator_.usage();
  throw Error(ErrorCode::heap_exhausted, "the symmetric heap of rank " + std::to_string(view_.rank) + " has no room for " +
                                             std::to_string(bytes) + " bytes: " + std::to_string(usage.free) + " of " +
                                             std::to_string(size_) + " are free, the largest block has " +
                                             std::to_string(usage.largest_free) + "; raise heap_bytes");
}

void SymmetricHeap::release(size_t offset) noexcept {
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(pools_, [&](const auto& pool) { return pool.first == offset; });
  }
  allocator_.release(offset);
}

}  // namespace switchyard::detail

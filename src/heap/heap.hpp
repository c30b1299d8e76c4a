// SPDX-License-Identifier: Apache-2.0
// Symmetric heap: every rank owns one segment of the same size, mapped by all ranks. An offset names the same object on all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "bootstrap/bootstrap.hpp"
#include "heap/offset_allocator.hpp"
#include "layout/heap_view.hpp"

namespace switchyard::detail {

/// Every segment starts at a multiple of this in every mapping; the largest alignment that allocate() grants.
inline constexpr size_t kHeapSegmentAlignment = size_t{2} << 20;

/// Owns the mappings of all segments of this host; the addresses of the others are null. Non-collective, idempotent
/// destruction: a segment disappears with its last user.
class SymmetricHeap {
 public:
  /// Collective. Each rank creates a segment of `bytes` (rounded up to pages) and maps all of them. A machine without enough
  /// memory fails now, on all ranks, with Error(system) naming sizes, and never with a signal later: processes commit every
  /// page here, threads check the sum against what the machine and the control group have left. Segments are anonymous: no name
  /// in any file system, gone with their last user, also after a crash; a fork does not get them.
  static std::unique_ptr<SymmetricHeap> create(Bootstrap& bootstrap, size_t bytes, Milliseconds deadline);
  /// Creates the heaps of all ranks of this process at once, from one thread. Element r belongs to rank r.
  static std::vector<std::unique_ptr<SymmetricHeap>> create_in_process(int world, size_t bytes) {
    return create_in_process(HostMap(world), bytes);
  }
  static std::vector<std::unique_ptr<SymmetricHeap>> create_in_process(const HostMap& hosts, size_t bytes);

  virtual ~SymmetricHeap() = default;
  const HeapView& view() const noexcept { return view_; }
  size_t size() const noexcept { return size_; }
  size_t used() const;
  /// Where rank r's header is, for the host: also a thread's of another host. Null if it is nowhere in this process.
  virtual HeapHeader* header(int r) const noexcept { return reinterpret_cast<HeapHeader*>(view_.base[r]); }

  /// Takes `bytes` at `alignment` (a power of two up to kHeapSegmentAlignment) from this rank's segment and returns the offset.
  /// If all ranks make the same calls in the same order the offsets agree; callers exchange and verify them. The memory is zero
  /// when first taken and keeps its bytes when taken again. First fit; sizes are rounded up to OffsetAllocator::kGranule, and
  /// none to one. The first `kept` bytes of the block survive sleep, by default all of it. Throws Error(heap_exhausted) naming
  /// asked, free, largest free and total sizes. Any thread.
  size_t allocate(size_t bytes, size_t alignment, size_t kept = std::numeric_limits<size_t>::max());
  /// The block at `offset` is divided by `pool`, whose offsets are offsets of the heap: what the pool keeps survives too. Any
  /// thread.
  void add_pool(size_t offset, std::weak_ptr<const KeepsRanges> pool);
  /// Gives back a block that allocate returned. Local, any thread.
  void release(size_t offset) noexcept;

  using Range = HeapRange;
  /// What sleep has to keep: the header, and what allocate and the pools were told.
  std::vector<Range> kept() const;
  /// Collective. Gives the memory of all segments back to the system, except that the bytes of `keep` (ranges of this rank's
  /// segment, ascending) are there again, unchanged, after wake. Addresses stay reserved, offsets allocated, the header
  /// (CPU) readable and writable. No rank may have work on the heap. Throws, on all ranks alike, Error(invalid_argument) for a
  /// heap that sleeps already or a range outside the segment, Error(unsupported) where memory cannot be given back.
  virtual void sleep(Bootstrap& bootstrap, std::span<const Range> keep, Milliseconds deadline) = 0;
  /// Collective. Takes memory again, at the same addresses: kept ranges as they were, the rest zero. Without enough memory it
  /// throws Error(system) on all ranks and the heap still sleeps: wake may be tried again.
  virtual void wake(Bootstrap& bootstrap, Milliseconds deadline) = 0;
  bool asleep() const noexcept { return asleep_; }

 protected:
  SymmetricHeap(const HeapView& view, size_t size);
  /// Throws Error(invalid_argument) unless the heap is awake and each range lies within the segment.
  void check_keep(std::span<const Range> keep) const;

  bool asleep_ = false;

 private:
  HeapView view_;
  size_t size_;
  OffsetAllocator allocator_;
  mutable std::mutex mutex_;
  std::vector<std::pair<size_t, std::weak_ptr<const KeepsRanges>>> pools_;  // by offset of their block
};

}  // namespace switchyard::detail

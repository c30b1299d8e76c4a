// SPDX-License-Identifier: Apache-2.0
// Symmetric heap: every rank owns one segment of the same size, mapped by all ranks. An offset denotes the same object on all
// ranks.
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

/// Alignment of every segment in every mapping, and the maximum alignment of allocate().
inline constexpr size_t kHeapSegmentAlignment = size_t{2} << 20;

/// Owns the mappings of all segments on this host; the addresses of other segments are null. Destruction is local and
/// idempotent; a segment is freed with its last user.
class SymmetricHeap {
 public:
  /// Collective. Each rank creates a segment of `bytes` (rounded up to whole pages) and maps all segments. If a machine has too
  /// little memory, throws Error(system) naming sizes on all ranks, and no signal is raised later. Processes commit every page
  /// here; threads compare the total with the memory available in the machine and the control group. Segments are anonymous:
  /// they have no name in any file system, are freed with their last user (even after a crash), and are not inherited across
  /// fork().
  static std::unique_ptr<SymmetricHeap> create(Bootstrap& bootstrap, size_t bytes, Milliseconds deadline);
  /// Creates the heaps of all ranks in this process at once, from one thread. Element r belongs to rank r.
  static std::vector<std::unique_ptr<SymmetricHeap>> create_in_process(int world, size_t bytes) {
    return create_in_process(HostMap(world), bytes);
  }
  static std::vector<std::unique_ptr<SymmetricHeap>> create_in_process(const HostMap& hosts, size_t bytes);

  virtual ~SymmetricHeap() = default;
  const HeapView& view() const noexcept { return view_; }
  size_t size() const noexcept { return size_; }
  size_t used() const;
  OffsetAllocator::Usage usage() const { return allocator_.usage(); }
  /// Host address of rank r's header, even if r is a thread on another host. Null if it is not in this process.
  virtual HeapHeader* header(int r) const noexcept { return reinterpret_cast<HeapHeader*>(view_.base[r]); }

  /// Allocates `bytes` at `alignment` (a power of two up to kHeapSegmentAlignment) from this rank's segment and returns the
  /// lowest available offset >= `at_least`. Offsets differ between ranks whose objects differ; callers agree on a common
  /// offset. The memory is zero when first allocated, and keeps its contents when reallocated after a release. Sizes are
  /// rounded up to OffsetAllocator::kGranule, with a minimum of one granule. The first `kept` bytes of the block (by default,
  /// all of it) survive sleep. Throws Error(heap_exhausted) naming the requested, free, largest free and total sizes. Any
  /// thread.
  size_t allocate(size_t bytes, size_t alignment, size_t kept = std::numeric_limits<size_t>::max(), size_t at_least = 0);
  /// Declares that `pool` subdivides the block at `offset`, using heap offsets: the pool's kept ranges also survive sleep. Any
  /// thread.
  void add_pool(size_t offset, std::weak_ptr<const KeepsRanges> pool);
  /// Releases a block from allocate(). Local, any thread.
  void release(size_t offset) noexcept;

  using Range = HeapRange;
  /// Ranges that sleep must preserve: the header and the kept ranges of allocate() and of the pools.
  std::vector<Range> kept() const;
  /// Collective. Returns the memory of all segments to the system. wake() restores the bytes in `keep` (ranges of this rank's
  /// segment, ascending) unchanged. Addresses stay reserved, offsets stay allocated, and the header (CPU) stays readable and
  /// writable. No rank may have pending work on the heap. Throws, on all ranks, Error(invalid_argument) if the heap is already
  /// asleep or a range is outside the segment, Error(unsupported) if the memory cannot be returned.
  virtual void sleep(Bootstrap& bootstrap, std::span<const Range> keep, Milliseconds deadline) = 0;
  /// Collective. Reallocates the memory at the same addresses: kept ranges are unchanged, the rest is zero. If memory is
  /// insufficient, throws Error(system) on all ranks; the heap then remains asleep, and wake() may be retried.
  virtual void wake(Bootstrap& bootstrap, Milliseconds deadline) = 0;
  bool asleep() const noexcept { return asleep_; }

 protected:
  SymmetricHeap(const HeapView& view, size_t size);
  /// Throws Error(invalid_argument) unless the heap is awake and each range is within the segment.
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

// SPDX-License-Identifier: Apache-2.0
// Symmetric heap: every rank owns one segment of the same size, mapped by all ranks. An offset names the same object on all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "bootstrap/bootstrap.hpp"
#include "heap/offset_allocator.hpp"
#include "layout/heap_view.hpp"

namespace switchyard::detail {

/// Every segment starts at a multiple of this in every mapping; the largest alignment that allocate() grants.
inline constexpr size_t kHeapSegmentAlignment = size_t{2} << 20;

/// Owns the mappings of all segments. Non-collective, idempotent destruction: a segment disappears with its last user.
class SymmetricHeap {
 public:
  /// Collective. Each rank creates a segment of `bytes` (rounded up to pages) and maps all of them. A machine without enough
  /// memory fails now, on all ranks, with Error(system) naming sizes, and never with a signal later: processes commit every
  /// page here, threads check the sum against what the machine and the control group have left. Segments are anonymous: no name
  /// in any file system, gone with their last user, also after a crash; a fork does not get them.
  static std::unique_ptr<SymmetricHeap> create(Bootstrap& bootstrap, size_t bytes, Milliseconds deadline);
  /// The same for all ranks of this process at once, from one thread. Element r belongs to rank r.
  static std::vector<std::unique_ptr<SymmetricHeap>> create_in_process(int world, size_t bytes);

  virtual ~SymmetricHeap() = default;
  const HeapView& view() const noexcept { return view_; }
  size_t size() const noexcept { return size_; }
  size_t used() const;

  /// Takes `bytes` at `alignment` (a power of two up to kHeapSegmentAlignment) from this rank's segment and returns the offset.
  /// If all ranks make the same calls in the same order the offsets agree; callers exchange and verify them. The memory is zero
  /// when first taken and keeps its bytes when taken again. First fit; sizes are rounded up to OffsetAllocator::kGranule, and
  /// none to one. Throws Error(heap_exhausted) naming asked, free, largest free and total sizes. Any thread.
  size_t allocate(size_t bytes, size_t alignment);
  /// Gives back a block that allocate returned. Local, any thread.
  void release(size_t offset) noexcept;

 protected:
  SymmetricHeap(const HeapView& view, size_t size);

 private:
  HeapView view_;
  size_t size_;
  OffsetAllocator allocator_;
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Symmetric heap: every rank owns one segment of the same size, mapped by all ranks. An offset names the same object on all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <map>

#include "bootstrap/bootstrap.hpp"
#include "layout/heap_view.hpp"

namespace switchyard::detail {

/// Owns the mappings of all segments. Non-collective, idempotent destruction.
class SymmetricHeap {
 public:
  /// Collective. Each rank creates a segment of `bytes` (rounded up to pages) and maps all of them. Pages are committed here, so
  /// that a machine without enough memory fails now, with Error(system) naming sizes, and never with a signal later.
  /// Segments are anonymous: no name in any file system, gone with their last user, also after a crash.
  static std::unique_ptr<SymmetricHeap> create(Bootstrap& bootstrap, size_t bytes, Milliseconds deadline);

  virtual ~SymmetricHeap() = default;
  const HeapView& view() const noexcept { return view_; }
  size_t size() const noexcept { return size_; }
  size_t used() const;

  /// Takes `bytes` at `alignment` (a power of two) from this rank's segment and returns the offset. If all ranks make the same
  /// calls in the same order the offsets agree; callers exchange and verify them. The memory is zero when first taken and keeps
  /// its bytes when taken again. Throws Error(heap_exhausted) naming asked, free, largest free and total sizes.
  size_t allocate(size_t bytes, size_t alignment);
  /// Gives back a block that allocate returned. Local.
  void release(size_t offset) noexcept;

 protected:
  SymmetricHeap(const HeapView& view, size_t size);

 private:
  HeapView view_;
  size_t size_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes
  std::map<size_t, size_t> used_;  // offset -> bytes
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// First-fit allocator for offsets in [begin, end), with coalescing. Deterministic: identical calls return identical offsets.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace switchyard::detail {

/// Offset and bytes.
using HeapRange = std::pair<size_t, size_t>;

/// Provides the ranges preserved when a sleeping heap returns its memory.
class KeepsRanges {
 public:
  virtual ~KeepsRanges() = default;
  /// Any thread.
  virtual std::vector<HeapRange> kept() const = 0;
};

class OffsetAllocator final : public KeepsRanges {
 public:
  /// Sizes and offsets are multiples of `granule`, so that blocks never share a cache line.
  static constexpr size_t kGranule = 64;

  OffsetAllocator(size_t begin, size_t end) : capacity_(end - begin) {
    if (end > begin) free_.emplace(begin, end - begin);
  }

  /// Returns the lowest available offset >= `at_least`, or nullopt if no free block is large enough. `alignment` is a power of
  /// two. The first `kept` bytes are recorded for kept(). Any thread.
  std::optional<size_t> allocate(size_t bytes, size_t alignment, size_t kept = 0, size_t at_least = 0);
  /// Releases a block from allocate(). Needs no memory and cannot fail. Any thread.
  void release(size_t offset) noexcept;

  struct Usage {
    size_t used = 0, free = 0, largest_free = 0, capacity = 0;
  };
  Usage usage() const;
  /// The first `kept` bytes of every allocated block.
  std::vector<HeapRange> kept() const override;

 private:
  size_t capacity_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes
  std::map<size_t, size_t> used_;  // offset -> bytes
  std::map<size_t, size_t> kept_;  // offset -> bytes
};

}  // namespace switchyard::detail

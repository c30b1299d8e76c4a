// SPDX-License-Identifier: Apache-2.0
// Allocator for ordered memory: each free range records the work for which its next user must wait.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "heap/offset_allocator.hpp"

namespace switchyard::detail {

/// An allocator for offsets in [begin, end). `Use` identifies work after which a free range's next user must be ordered; it
/// must be comparable. An allocated range inherits the uses of all its parts. Free ranges are merged only if their uses are
/// equal, so that no user waits for work on adjacent memory; an allocation may nevertheless span several ranges. Deterministic:
/// identical calls with identical costs return identical offsets. Any thread.
template <class Use>
class OrderedRanges final : public KeepsRanges {
 public:
  using Uses = std::vector<Use>;
  /// Sizes and offsets are multiples of this.
  static constexpr size_t kGranule = 128;

  OrderedRanges(size_t begin, size_t end) : capacity_(end - begin) {
    if (end > begin) free_.emplace(begin, Range{end - begin, {}});
  }

  struct Taken {
    size_t offset;
    Uses after;  ///< without duplicates
  };
  /// Allocates `bytes` where the total cost of the uses is lowest. `cost(use)` is called for each use of a range; it returns 0
  /// if waiting for the use costs nothing, and kNever if waiting is impossible. If costs are equal, the lowest offset is
  /// chosen. Returns nullopt if there is no space. The first `kept` bytes are recorded for kept().
  static constexpr int kNever = 1 << 20;
  template <class Cost>
  std::optional<Taken> take(size_t bytes, size_t kept, Cost&& cost) {
    const size_t wanted = std::max(round_up(bytes), kGranule);
    const std::lock_guard lock(mutex_);
    auto best = free_.end();
    int least = kNever;
    for (auto first = free_.begin(); first != free_.end() && least > 0; ++first) {
      const int price = price_of(first, wanted, cost);
      if (price < least) best = first, least = price;
    }
    if (best == free_.end()) return std::nullopt;
    Taken taken{best->first, {}};
    used_.emplace(taken.offset, Range{wanted, {}});
    if (kept > 0) kept_.emplace(taken.offset, std::min(kept, wanted));
    cut(best, wanted, taken.after);
    return taken;
  }

  /// Releases a range from take(), to be reused after `after`. Needs no memory and cannot fail.
  void give(size_t offset, Uses&& after) noexcept {
    const std::lock_guard lock(mutex_);
    const auto block = used_.find(offset);
    assert(block != used_.end() && "an offset that take did not return");
    if (block == used_.end()) return;
    kept_.erase(offset);
    block->second.after = std::move(after);
    join_around(free_.insert(used_.extract(block)).position);  // moves the node: no allocation
  }

  /// Removes the uses for which `over(use)` returns true, and merges ranges that thereby become equal.
  template <class Over>
  void forget(Over&& over) {
    const std::lock_guard lock(mutex_);
    for (auto& [offset, range] : free_) std::erase_if(range.after, over);
    for (auto at = free_.begin(); at != free_.end();) at = std::next(join_around(at));
  }
  /// Number of free ranges.
  size_t pieces() const {
    const std::lock_guard lock(mutex_);
    return free_.size();
  }

  OffsetAllocator::Usage usage() const {
    const std::lock_guard lock(mutex_);
    OffsetAllocator::Usage u;
    u.capacity = capacity_;
    for (const auto& [offset, range] : used_) u.used += range.bytes;
    size_t run = 0, end = 0;
    for (const auto& [offset, range] : free_) {
      u.free += range.bytes;
      run = offset == end ? run + range.bytes : range.bytes;
      end = offset + range.bytes;
      u.largest_free = std::max(u.largest_free, run);
    }
    return u;
  }
  std::vector<HeapRange> kept() const override {
    const std::lock_guard lock(mutex_);
    return {kept_.begin(), kept_.end()};
  }

 private:
  struct Range {
    size_t bytes;
    Uses after;
  };
  using Ranges = std::map<size_t, Range>;  // by offset

  static size_t round_up(size_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

  /// Cost of `wanted` bytes starting at `first`; kNever if they are not available.
  template <class Cost>
  int price_of(typename Ranges::iterator first, size_t wanted, Cost&& cost) const {
    int price = 0;
    size_t have = 0;
    for (auto at = first; at != free_.end() && at->first == first->first + have && price < kNever; ++at) {
      for (const Use& use : at->second.after) price = std::min(price + cost(use), kNever);
      have += at->second.bytes;
      if (have >= wanted) return price;
    }
    return kNever;
  }

  /// Allocates `wanted` bytes starting at `at`.
  void cut(typename Ranges::iterator at, size_t wanted, Uses& after) {
    for (size_t have = 0; have < wanted;) {
      const auto [offset, range] = std::pair(at->first, std::move(at->second));
      at = free_.erase(at);
      for (const Use& use : range.after)
        if (std::find(after.begin(), after.end(), use) == after.end()) after.push_back(use);
      have += range.bytes;
      if (have > wanted) free_.emplace(offset + range.bytes - (have - wanted), Range{have - wanted, range.after});
    }
  }

  /// Merges `at` with its neighbors. \returns the range that now contains it
  typename Ranges::iterator join_around(typename Ranges::iterator at) noexcept {
    const auto joins = [](auto left, auto right) {
      return left->first + left->second.bytes == right->first && left->second.after == right->second.after;
    };
    if (const auto next = std::next(at); next != free_.end() && joins(at, next)) {
      at->second.bytes += next->second.bytes;
      free_.erase(next);
    }
    if (at == free_.begin()) return at;
    const auto previous = std::prev(at);
    if (!joins(previous, at)) return at;
    previous->second.bytes += at->second.bytes;
    free_.erase(at);
    return previous;
  }

  size_t capacity_;
  mutable std::mutex mutex_;
  Ranges free_, used_;
  std::map<size_t, size_t> kept_;  // offset -> bytes
};

}  // namespace switchyard::detail

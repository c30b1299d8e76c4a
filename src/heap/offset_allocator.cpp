// SPDX-License-Identifier: Apache-2.0
#include "heap/offset_allocator.hpp"

#include <algorithm>
#include <cassert>
#include <iterator>

namespace switchyard::detail {

namespace {
size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
}  // namespace

std::optional<size_t> OffsetAllocator::allocate(size_t bytes, size_t alignment, size_t kept, size_t at_least) {
  if (bytes > capacity_) return std::nullopt;
  const size_t wanted = std::max(round_up(bytes, kGranule), kGranule);
  const std::lock_guard lock(mutex_);
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    const auto [start, length] = *block;
    const size_t offset = round_up(std::max(start, at_least), std::max(alignment, kGranule));
    const size_t gap = offset - start;
    if (gap > length || wanted > length - gap) continue;
    used_.emplace(offset, wanted);
    if (kept > 0) kept_.emplace(offset, std::min(kept, wanted));
    free_.erase(block);
    if (gap > 0) free_.emplace(start, gap);
    if (length - gap > wanted) free_.emplace(offset + wanted, length - gap - wanted);
    return offset;
  }
  return std::nullopt;
}

void OffsetAllocator::release(size_t offset) noexcept {
  const std::lock_guard lock(mutex_);
  const auto block = used_.find(offset);
  assert(block != used_.end() && "release of an offset that allocate did not return");
  if (block == used_.end()) return;
  kept_.erase(offset);
  auto inserted = free_.insert(used_.extract(block)).position;  // moves the node: no allocation
  const auto next = std::next(inserted);
  if (next != free_.end() && inserted->first + inserted->second == next->first) {
    inserted->second += next->second;
    free_.erase(next);
  }
  if (inserted == free_.begin()) return;
  const auto previous = std::prev(inserted);
  if (previous->first + previous->second == inserted->first) {
    previous->second += inserted->second;
    free_.erase(inserted);
  }
}

std::vector<HeapRange> OffsetAllocator::kept() const {
  const std::lock_guard lock(mutex_);
  return {kept_.begin(), kept_.end()};
}

OffsetAllocator::Usage OffsetAllocator::usage() const {
  const std::lock_guard lock(mutex_);
  Usage u;
  u.capacity = capacity_;
  for (const auto& [offset, bytes] : used_) u.used += bytes;
  for (const auto& [offset, bytes] : free_) {
    u.free += bytes;
    u.largest_free = std::max(u.largest_free, bytes);
  }
  return u;
}

}  // namespace switchyard::detail

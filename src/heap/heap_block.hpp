// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>

#include "heap/heap.hpp"

namespace switchyard::detail {

/// Owns a block in a symmetric heap.
class HeapBlock {
 public:
  HeapBlock() = default;
  /// Allocates with SymmetricHeap::allocate.
  HeapBlock(SymmetricHeap& heap, size_t bytes, size_t alignment, size_t kept, size_t at_least)
      : heap_(&heap), offset_(heap.allocate(bytes, alignment, kept, at_least)) {}
  HeapBlock(HeapBlock&& other) noexcept : heap_(std::exchange(other.heap_, nullptr)), offset_(other.offset_) {}
  HeapBlock& operator=(HeapBlock&& other) noexcept {
    std::swap(heap_, other.heap_);
    std::swap(offset_, other.offset_);
    return *this;
  }
  ~HeapBlock() {
    if (heap_) heap_->release(offset_);
  }
  /// Offset in the heap; 0 if default-constructed.
  size_t offset() const { return offset_; }

 private:
  SymmetricHeap* heap_ = nullptr;
  size_t offset_ = 0;
};

}  // namespace switchyard::detail

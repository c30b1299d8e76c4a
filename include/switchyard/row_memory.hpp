// SPDX-License-Identifier: Apache-2.0
#pragma once
/// \file
/// RowMemory: symmetric memory that an allocator of the caller's hands out.

#include <cstddef>
#include <memory>

#include "switchyard/group.hpp"

namespace switchyard {

namespace detail {
class RowMemoryState;
}

/// A block of the group's symmetric heap for allocators of others, as torch's. Rows that a dispatch is to write there
/// (DispatchOptions::out) arrive there, and a combine reads rows there, both without a copy. Where it has no room left it gives
/// ordinary memory of the rank, which costs that copy and is right all the same, so that an allocator over it never fails
/// early. Movable. It ends before its group does, and when all memory that it gave is released, also while work uses it.
class RowMemory {
 public:
  RowMemory() noexcept;
  /// Collective; takes `bytes` of the heap, the same number on all ranks. \throws Error(heap_exhausted), Error(mismatch), as
  /// the construction of an exchange
  RowMemory(Group& group, size_t bytes);
  RowMemory(RowMemory&&) noexcept;
  RowMemory& operator=(RowMemory&&) noexcept;
  ~RowMemory();

  /// At least `bytes` at a multiple of 512. On GPUs for work on `stream` (cudaStream_t). Local; any thread. \throws
  /// Error(system) without memory of either kind
  void* allocate(size_t bytes, void* stream = nullptr);
  /// Gives back what allocate() returned. On GPUs nobody else has it before all work that was enqueued on `stream` so far is
  /// done; nothing waits. Work on other streams is done, or `stream` waits for it. Local; any thread.
  void release(void* memory, void* stream = nullptr) noexcept;
  /// Whether an address lies in the block: not in the ordinary memory.
  bool contains(const void* memory) const noexcept;

 private:
  std::unique_ptr<detail::RowMemoryState> state_;
};

}  // namespace switchyard

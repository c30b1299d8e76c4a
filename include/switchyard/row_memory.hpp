// SPDX-License-Identifier: Apache-2.0
#pragma once
/// \file
/// RowMemory: symmetric memory for a caller's allocator.

#include <cstddef>
#include <memory>

#include "switchyard/group.hpp"

namespace switchyard {

namespace detail {
class RowMemoryState;
}

/// A block of the group's symmetric heap for external allocators, for example torch's. A dispatch can write rows to it
/// (DispatchOptions::out), and a combine can read rows from it, without a copy. When the block is full, allocate() returns
/// ordinary memory of the rank, which costs that copy but is otherwise equivalent, so an allocator built on it does not fail
/// early. Movable. Must be destroyed before its group and after all memory from it has been released; work in flight may still
/// use that memory.
class RowMemory {
 public:
  RowMemory() noexcept;
  /// Collective. Allocates `bytes` bytes, the same number on all ranks, from the heap. \throws Error(heap_exhausted),
  /// Error(mismatch), as the construction of an exchange.
  RowMemory(Group& group, size_t bytes);
  RowMemory(RowMemory&&) noexcept;
  RowMemory& operator=(RowMemory&&) noexcept;
  ~RowMemory();

  /// Allocates at least `bytes` bytes, aligned to 512; on GPUs, for work on `stream` (cudaStream_t). Local; any thread. \throws
  /// Error(system) if memory of neither kind is available.
  void* allocate(size_t bytes, void* stream = nullptr);
  /// Releases memory from allocate(). On GPUs, the memory is not reused until all work enqueued on `stream` so far is done; the
  /// call does not wait. Work on other streams must already be done, or `stream` must wait for it. Local; any thread.
  void release(void* memory, void* stream = nullptr) noexcept;
  /// Returns true if the address is in the block rather than in ordinary memory.
  bool contains(const void* memory) const noexcept;

 private:
  std::unique_ptr<detail::RowMemoryState> state_;
};

}  // namespace switchyard

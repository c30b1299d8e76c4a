// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace switchyard::detail {

/// What a block of memory holds. What a handle needs survives Group::sleep. Staging is touched by calls of the object only.
enum class Content : uint8_t { rows, handle, staging };

/// Memory of rows that a user holds. Given back by the destructor, on any thread. Keeps the bookkeeping alive, not the heap:
/// rows of a pool must not be touched after their group is gone.
struct OutputBlock {
  size_t offset = 0;  ///< in the heap, if it is symmetric memory
  std::byte* data = nullptr;

  OutputBlock() = default;
  OutputBlock(const OutputBlock&) = delete;
  OutputBlock& operator=(const OutputBlock&) = delete;
  virtual ~OutputBlock() = default;
  virtual void used_by(void*) {}
};

}  // namespace switchyard::detail

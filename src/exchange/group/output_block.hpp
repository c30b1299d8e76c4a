// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace switchyard::detail {

/// Content of a block. Data that a handle needs survives Group::sleep. Only calls of the object access staging.
enum class Content : uint8_t { rows, handle, staging };

/// Memory of rows that a user holds. The destructor releases it, on any thread. Keeps the bookkeeping but not the heap alive:
/// rows of a pool must not be accessed after their group is destroyed.
struct OutputBlock {
  size_t offset = 0;  ///< in the heap, for symmetric memory
  std::byte* data = nullptr;

  OutputBlock() = default;
  OutputBlock(const OutputBlock&) = delete;
  OutputBlock& operator=(const OutputBlock&) = delete;
  virtual ~OutputBlock() = default;
  virtual void used_by(void*) {}
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace switchyard::detail {

/// Content of a block. Data needed by a handle survives Group::sleep. Staging is accessed only by calls of the object.
enum class Content : uint8_t { rows, handle, staging };

/// Memory of rows held by a user. The destructor releases it on any thread. Keeps the bookkeeping alive but not the heap: rows
/// in a pool must not be accessed after their group is destroyed.
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

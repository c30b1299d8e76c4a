// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace switchyard::detail {

/// Places parts consecutively in one block of memory. If there is no block, only counts their bytes, and all parts are null.
class Carver {
 public:
  /// Parts are aligned to `alignment` relative to `base`, or to 0 if `base` is null.
  explicit Carver(std::byte* base, int64_t alignment = 128) : base_(base), alignment_(alignment) {}

  /// Sets `part` to memory for `count` elements.
  template <class T>
  void take(T*& part, int64_t count) {
    part = base_ ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + alignment_ - 1) / alignment_ * alignment_;
  }
  /// Total size in bytes of all parts so far.
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* const base_;
  const int64_t alignment_;
  int64_t bytes_ = 0;
};

}  // namespace switchyard::detail

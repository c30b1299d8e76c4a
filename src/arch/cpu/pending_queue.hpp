// SPDX-License-Identifier: Apache-2.0
// Row ops that a warp of the deferred CPU arch has issued but not yet performed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arch/ops.hpp"

namespace switchyard::detail {

/// Pointer arrays are copied when an op is queued; the rows themselves are not accessed before perform().
class PendingQueue {
 public:
  void add_copy(void* dst, const void* src, size_t bytes);
  void add_multicast(void* const* dsts, int n, const void* src, size_t bytes);
  void add_zero(void* dst, size_t bytes);
  void add_reduce(const ReduceSpec& spec);

  /// Performs all ops in reverse order: pending ops are unordered, and protocol code is least likely to depend on this order.
  void perform();
  void discard() noexcept;
  size_t size() const noexcept { return ops_.size(); }

 private:
  enum class Kind : uint8_t { copy, zero, reduce };
  struct Op {
    Kind kind;
    void* dst;
    const void* src;
    size_t bytes;
    ReduceSpec reduce;  // its rows and weights are given by the offsets
    size_t rows_at;     // into pointers_
    size_t weights_at;  // into weights_
  };
  std::vector<Op> ops_;
  std::vector<const void*> pointers_;
  std::vector<float> weights_;
};

}  // namespace switchyard::detail

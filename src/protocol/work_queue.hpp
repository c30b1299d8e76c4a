// SPDX-License-Identifier: Apache-2.0
// Dynamically assigned work. The link serves some multiprocessors up to 40 % faster than others, so with equal shares, the
// faster ones would be idle at the end (docs/design/0018-assigned-work.md).
#pragma once

#include "arch/ops.hpp"
#include "base/macros.hpp"

namespace switchyard::detail {

/// Assigns the indices 0, 1, 2, ... to the warps of a rank: each index to exactly one warp, and in ascending order for each
/// warp. Each warp has its own queue; the queues share one `counter` in the rank's memory, which is 0 before the first index is
/// taken. There is no last index: the caller compares indices with its own end and calls reset() when all warps are past it.
/// Taking an index implies no memory order.
template <class A>
class WorkQueue {
 public:
  /// `batch` is the number of indices taken at a time. More than one is faster if processing an item costs less than taking its
  /// index.
  SWITCHYARD_FN explicit WorkQueue(uint64_t* counter, int batch = 1) : counter_(counter), batch_(batch) {}
  /// Continues with indices already taken by another queue of this warp: `item` and those after it, `left` in total.
  SWITCHYARD_FN WorkQueue(uint64_t* counter, int batch, int64_t item, int left)
      : counter_(counter), batch_(batch), left_(left), item_(item) {}

  /// The index on which this warp is working. It does not change until done() is called.
  SWITCHYARD_FN int64_t item(typename A::Warp& w) {
    if (left_ == 0) {
      item_ = static_cast<int64_t>(A::take(w, counter_, static_cast<uint64_t>(batch_)));
      left_ = batch_;
    }
    return item_;
  }
  /// Ends the work on item(); the next call to item() returns another index.
  SWITCHYARD_FN void done() {
    ++item_;
    --left_;
  }

  /// Number of indices that this warp has taken but not finished.
  SWITCHYARD_FN int left() const { return left_; }

  /// Restarts `counter` at 0. Call from one warp after every warp has reached the end of the work. The caller must be ordered
  /// after all these warps (by an acquire) and before the next take (by a release).
  SWITCHYARD_FN static void reset(typename A::Warp& w, uint64_t* counter) {
    A::for_lanes(w, 1, [&](int) { *counter = 0; });
  }

 private:
  uint64_t* counter_;
  int batch_, left_ = 0;
  int64_t item_ = 0;
};

}  // namespace switchyard::detail

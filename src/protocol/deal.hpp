// SPDX-License-Identifier: Apache-2.0
// Work that is dealt while it is done: multiprocessors differ in how fast the link serves them, by up to 40 %, so equal shares
// would leave the fast ones idle at the end (docs/design/0018-dealt-work.md).
#pragma once

#include "arch/ops.hpp"
#include "base/macros.hpp"

namespace switchyard::detail {

/// One warp's items of a rank's 0, 1, 2, ...: each goes to one warp, each warp's ascend. `counter` is this rank's, and 0 before
/// the first warp takes an item; after the last has taken one that does not exist, someone ordered behind all sets it to 0.
/// Taking orders nothing.
template <class A>
class Deal {
 public:
  /// `batch`: items that are taken at a time, where one is less work than taking it.
  SWITCHYARD_FN explicit Deal(uint64_t* counter, int batch = 1) : counter_(counter), batch_(batch) {}

  /// This warp's item.
  SWITCHYARD_FN int64_t item(typename A::Warp& w) {
    if (left_ == 0) {
      item_ = static_cast<int64_t>(A::take(w, counter_, static_cast<uint64_t>(batch_)));
      left_ = batch_;
    }
    return item_;
  }
  /// Turns to the next one.
  SWITCHYARD_FN void done() {
    ++item_;
    --left_;
  }

 private:
  uint64_t* counter_;
  int batch_, left_ = 0;
  int64_t item_ = 0;
};

/// By someone ordered behind all that took items, before others take any.
template <class A>
SWITCHYARD_FN void deal_again(typename A::Warp& w, uint64_t* counter) {
  A::for_lanes(w, 1, [&](int) { *counter = 0; });
}

}  // namespace switchyard::detail

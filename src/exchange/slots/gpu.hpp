// SPDX-License-Identifier: Apache-2.0
// SlotSelector on a GPU, for objects whose kernels select slots.
#pragma once

#include <optional>

#include "exchange/gpu/call_order.hpp"
#include "exchange/slots/impl.hpp"
#include "exchange/slots/launch.hpp"

namespace switchyard::detail {

/// The implementation of every selector of a group with a device.
class GpuSlotSelector : public SlotSelectorImpl {
 public:
  /// Calls launch(selection), which enqueues work on `stream`. This work is ordered among the selector's calls: a later map
  /// is copied after it. Requires the rank's GPU to be current.
  template <class Launch>
  void in_order(gpu::Stream stream, const Launch& launch) {
    const CallStream at = order_->begin(stream);
    launch(selection());
    order_->end(at, 0);
  }

 protected:
  using SlotSelectorImpl::SlotSelectorImpl;

  std::optional<CallOrder> order_;  ///< set by the constructor

 private:
  virtual SlotSelection selection() const = 0;
};

}  // namespace switchyard::detail

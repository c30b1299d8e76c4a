// SPDX-License-Identifier: Apache-2.0
// Calls of NormalExchange with more arguments, for bindings and layers. If `known_memory` is true, the caller guarantees that
// all memory passed to the call belongs to this rank's GPU, as a framework can for its tensors. The call then omits the driver
// query per pointer, which takes more host time than all other checks; everything else is checked. No effect on the CPU.
#pragma once

#include <cstddef>

#include "switchyard/normal.hpp"

namespace switchyard {
class SlotSelector;
}

namespace switchyard::detail {

struct NormalCalls {
  /// `selector`: as MoeLayerCall::selector; must be null before reserve_slots().
  static Dispatched dispatch(NormalExchange& exchange, const ConstRows& x, const ExpertIds& ids, const float* weights,
                             const DispatchOptions& options, bool known_memory, SlotSelector* selector = nullptr);
  /// Local. Allocates memory for the slots of one call: slot_bytes().
  static void reserve_slots(NormalExchange& exchange);
  static size_t slot_bytes(const NormalConfig& config);
  /// Cached dispatch.
  static Dispatched dispatch(NormalExchange& exchange, const ConstRows& x, const Handle& handle, const DispatchOptions& options,
                             bool known_memory);
  static void combine(NormalExchange& exchange, const ConstRows& y, const Handle& handle, void* out,
                      const CombineOptions& options, float* out_weights, bool known_memory);
};

}  // namespace switchyard::detail

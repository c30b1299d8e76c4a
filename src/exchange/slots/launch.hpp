// SPDX-License-Identifier: Apache-2.0
// Launch of the kernel of SlotSelector.
#pragma once

#include <cstdint>

#include "exchange/gpu/kernel.hpp"
#include "plan/slot_table.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

/// With all fields zero, the kernel does nothing.
struct SelectParams {
  const void* ids = nullptr;
  void* slots = nullptr;
  bool ids64 = false;
  int topk = 0;
  int64_t routes = 0;  ///< tokens * topk
  SlotTable table;
  unsigned long long* counts = nullptr;  ///< [E], incremented
};

void launch_select(const SelectParams& params, int max_blocks, gpu::Stream stream);

}  // namespace switchyard::detail

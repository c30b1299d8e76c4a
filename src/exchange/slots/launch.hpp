// SPDX-License-Identifier: Apache-2.0
// Launch of the kernel of SlotSelector, and its parameters, which other kernels may use to select slots themselves.
#pragma once

#include <cstdint>

#include "exchange/gpu/kernel.hpp"
#include "plan/slot_table.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

/// Memory of a selector on a GPU. Kernels that use it run in the order of the selector's calls.
struct SlotSelection {
  SlotTable table;
  unsigned long long* counts = nullptr;  ///< [E], incremented
};

/// With all fields zero, the kernel does nothing.
struct SelectParams {
  const void* ids = nullptr;
  void* slots = nullptr;  ///< null: the routes are only counted
  bool ids64 = false;
  int topk = 0;
  int64_t tokens = 0;
  const int32_t* device_tokens = nullptr;  ///< null, or the number of tokens when the kernel runs, at most `tokens`
  SlotSelection selection;
  uint32_t* version = nullptr;  ///< null, or for the table's version
};

void launch_select(const SelectParams& params, int max_blocks, gpu::Stream stream);

}  // namespace switchyard::detail

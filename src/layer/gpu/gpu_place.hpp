// SPDX-License-Identifier: Apache-2.0
// On which GPU a rank computes.
#pragma once

#include <array>

namespace switchyard::detail {

/// Of the GPU that is current; all zero on the CPU.
struct GpuPlace {
  std::array<char, 16> uuid{};
  int multiprocessors = 0;
};
/// Throws Error(system), or Error(unsupported) where the library was built without CUDA.
GpuPlace current_gpu_place();

}  // namespace switchyard::detail

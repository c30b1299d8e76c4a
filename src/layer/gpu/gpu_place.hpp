// SPDX-License-Identifier: Apache-2.0
// On which GPU a rank computes, and how a call begins there.
#pragma once

#include <array>

#include "switchyard/group.hpp"

namespace switchyard::detail {

/// All zero, and device -1, on the CPU.
struct GpuPlace {
  std::array<char, 16> uuid{};
  int multiprocessors = 0;
  int device = -1;
};
/// The GPU of this rank, as GroupOptions::device says. Throws Error(system), or Error(unsupported) where the library was built
/// without CUDA.
GpuPlace gpu_place_of(const Group& group);

/// Makes a GPU current for this thread while it lives, unless it is already; -1: none. The caller's is current again
/// afterwards. Throws Error(system).
class CurrentGpu {
 public:
  explicit CurrentGpu(int device);
  ~CurrentGpu();
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

 private:
  int before_ = -1;
};

}  // namespace switchyard::detail

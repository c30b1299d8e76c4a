// SPDX-License-Identifier: Apache-2.0
// A rank's GPU, and a guard that makes it current during a call.
#pragma once

#include <array>

#include "switchyard/group.hpp"

namespace switchyard::detail {

/// On the CPU, all members are zero, and the device is -1.
struct GpuPlace {
  std::array<char, 16> uuid{};
  int multiprocessors = 0;
  int device = -1;
};
/// This rank's GPU, from GroupOptions::device. Throws Error(system), or Error(unsupported) if the library was built without
/// CUDA.
GpuPlace gpu_place_of(const Group& group);

/// True if the stream (cudaStream_t) is being captured.
bool is_captured(void* stream);
/// Orders later work on `stream` after `event`, a cudaEvent_t or null. Throws Error(system).
void order_after(void* stream, void* event);

/// Makes a GPU current for this thread during its lifetime, unless it is already current; -1: no GPU. Restores the caller's GPU
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

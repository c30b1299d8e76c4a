// SPDX-License-Identifier: Apache-2.0
// Host interface of the whole-exchange kernel: the library's own kernel and those that callers compile for their functions. A
// caller's file depends on the library's internals only through this header and flat_kernel.cuh.
#pragma once

#include "exchange/gpu/kernel.hpp"
#include "exchange/gpu/state.hpp"
#include "protocol/low_latency/flat_exchange.hpp"
#include "switchyard/tuning.hpp"
#include "switchyard/version.h"

namespace switchyard::detail {

inline constexpr int kLowLatencyWarps = kMaxLowLatencyWarps;  ///< per block, without a tuning

/// Device memory of one object.
using LowLatencyState = EpochState;

struct CudaFlat {
  FlatParams f;  ///< without the epoch
  LowLatencyState* state = nullptr;
  const int32_t* device_tokens = nullptr;
  int warps = kLowLatencyWarps;           ///< of this launch
  const uint32_t* map_version = nullptr;  ///< for LowLatencyDispatchParams::map_version; null: no slots are selected
};

/// Experts that scale rows.
void launch_low_latency(const CudaFlat& params, int blocks, const DeviceLimits& limits, gpu::Stream stream);

/// Result of row_function_on_gpu. Compiled in the caller's translation unit; kAbi tells whether that unit was compiled with the
/// same structures.
struct CudaRowFunction : RowFunctionBase {
  CudaRowFunction() noexcept : RowFunctionBase(Backend::cuda) {}
  /// Like launch_low_latency. First prepares the function for launch on `device`, if necessary.
  virtual gpu::Status launch(const CudaFlat& params, int blocks, const DeviceLimits& limits, gpu::Stream stream) const = 0;
  static constexpr uint64_t kAbi =
      sizeof(CudaFlat) << 32 | sizeof(DeviceLimits) << 24 | SY_VERSION_MAJOR << 16 | SY_VERSION_MINOR << 8 | SY_VERSION_PATCH;
  uint64_t abi = kAbi;
  int device = -1;
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// The kernels of low-latency mode, as the host sees them. Every function enqueues on `stream` of the current device and returns
// without waiting; failures of the launch throw Error(system).
#pragma once

#include "exchange/cuda/launch.hpp"
#include "protocol/flat_exchange.hpp"
#include "protocol/low_latency_dispatch.hpp"
#include "switchyard/version.h"

namespace switchyard::detail {

inline constexpr int kLowLatencyWarps = kMostLowLatencyWarps;  ///< per block, without a tuning

/// Device memory of one object.
using LowLatencyState = EpochState;

struct CudaLowLatencyDispatch {
  LowLatencyDispatchParams d;  ///< all but the epoch
  LowLatencyState* state = nullptr;
  const int32_t* device_tokens = nullptr;
  int warps = kLowLatencyWarps;  ///< of this launch
};
struct CudaLowLatencyCombine {
  LowLatencyCombineParams c;  ///< all but the epoch
  LowLatencyState* state = nullptr;
  int warps = kLowLatencyWarps;  ///< of this launch
};

struct CudaFlat {
  FlatParams f;  ///< all but the epoch
  LowLatencyState* state = nullptr;
  const int32_t* device_tokens = nullptr;
  int warps = kLowLatencyWarps;  ///< of this launch
};

/// Which halves of a call a launch does. The one with the receiving half ends the call.
struct LaunchedHalves {
  bool send = true, receive = true;
};

inline void set_idle(LaunchedHalves& halves, const IdleCall&) { halves = {true, false}; }

void launch_low_latency(const CudaLowLatencyDispatch& params, LaunchedHalves halves, int blocks, const DeviceLimits& limits,
                        cudaStream_t stream);
void launch_low_latency(const CudaLowLatencyCombine& params, LaunchedHalves halves, int blocks, const DeviceLimits& limits,
                        cudaStream_t stream);
/// Experts that scale.
void launch_low_latency(const CudaFlat& params, int blocks, const DeviceLimits& limits, cudaStream_t stream);

/// What row_function_on_gpu makes. Compiled in the caller's translation unit: kAbi tells whether that saw the same structures.
struct CudaRowFunction : RowFunctionBase {
  CudaRowFunction() noexcept : RowFunctionBase(Backend::cuda) {}
  /// As launch_low_latency. Ready to be launched on `device`.
  virtual cudaError_t launch(const CudaFlat& params, int blocks, const DeviceLimits& limits, cudaStream_t stream) const = 0;
  static constexpr uint64_t kAbi = sizeof(CudaFlat) << 32 | sizeof(DeviceLimits) << 24 | SWITCHYARD_VERSION_MAJOR << 16 |
                                   SWITCHYARD_VERSION_MINOR << 8 | SWITCHYARD_VERSION_PATCH;
  uint64_t abi = kAbi;
  int device = -1;
};

}  // namespace switchyard::detail

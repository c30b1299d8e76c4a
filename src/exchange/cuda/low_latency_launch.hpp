// SPDX-License-Identifier: Apache-2.0
// The kernels of low-latency mode, as the host sees them. Every function enqueues on `stream` of the current device and returns
// without waiting; failures of the launch throw Error(system).
#pragma once

#include "exchange/cuda/launch.hpp"
#include "protocol/flat_exchange.hpp"

namespace switchyard::detail {

inline constexpr int kLowLatencyWarps = 16;  ///< per block

/// Device memory of one object.
using LowLatencyState = EpochState;

struct CudaLowLatencyDispatch {
  LowLatencyDispatchParams d;  ///< all but the epoch
  LowLatencyState* state = nullptr;
  const int32_t* device_tokens = nullptr;
};
struct CudaLowLatencyCombine {
  LowLatencyCombineParams c;  ///< all but the epoch
  LowLatencyState* state = nullptr;
};

struct CudaFlat {
  FlatParams f;  ///< all but the epoch
  LowLatencyState* state = nullptr;
  const int32_t* device_tokens = nullptr;
};

/// Which halves of a call a launch does. The one with the receiving half ends the call.
struct LaunchedHalves {
  bool send = true, receive = true;
};

/// Most scratch that a warp can have, in bytes.
int64_t low_latency_scratch_limit(const DeviceLimits& limits);
void prepare_low_latency_kernels(const DeviceLimits& limits);
/// As warm_up_plan_kernel.
void warm_up_low_latency_kernels(const CallContext& call, const DeviceLimits& limits, LowLatencyState* state,
                                 cudaStream_t stream);
/// `scratch_bytes`: of a warp.
void launch_low_latency(const CudaLowLatencyDispatch& params, LaunchedHalves halves, int64_t scratch_bytes, int blocks,
                        const DeviceLimits& limits, cudaStream_t stream);
void launch_low_latency(const CudaLowLatencyCombine& params, LaunchedHalves halves, int64_t scratch_bytes, int blocks,
                        const DeviceLimits& limits, cudaStream_t stream);

void launch_low_latency(const CudaFlat& params, LaunchedHalves halves, int64_t scratch_bytes, int blocks,
                        const DeviceLimits& limits, cudaStream_t stream);

}  // namespace switchyard::detail

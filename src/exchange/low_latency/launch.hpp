// SPDX-License-Identifier: Apache-2.0
// Host interface of the low-latency kernels. Every function enqueues on `stream` of the current device and returns without
// waiting. Launch failures throw Error(system).
#pragma once

#include "exchange/low_latency/flat_launch.hpp"
#include "exchange/slots/launch.hpp"
#include "protocol/low_latency/dispatch.hpp"

namespace switchyard::detail {

struct CudaLowLatencyDispatch {
  LowLatencyDispatchParams d;  ///< without the epoch
  LowLatencyState* state = nullptr;
  const int32_t* device_tokens = nullptr;
  int warps = kLowLatencyWarps;  ///< of this launch
  const uint32_t* map_version =
      nullptr;  ///< for LowLatencyDispatchParams::map_version; null: the kernel selects, or no slots are selected
};
struct CudaLowLatencyCombine {
  LowLatencyCombineParams c;  ///< without the epoch
  LowLatencyState* state = nullptr;
  int warps = kLowLatencyWarps;  ///< of this launch
};

/// The halves of a call performed by a launch. The launch that includes the receiving half ends the call.
struct LaunchedHalves {
  bool send = true, receive = true;
};

inline void set_idle(LaunchedHalves& halves, const IdleCall&) { halves = {true, false}; }

void launch_low_latency(const CudaLowLatencyDispatch& params, LaunchedHalves halves, int blocks, const DeviceLimits& limits,
                        gpu::Stream stream);
/// Variant for expert ids: like launch_select(), the kernel counts their routes and replaces them with slots of `selection`.
/// Returns false, without a launch, if no kernel can do so for these parameters. \pre halves.send
bool launch_low_latency(const CudaLowLatencyDispatch& params, const SlotSelection& selection, LaunchedHalves halves, int blocks,
                        const DeviceLimits& limits, gpu::Stream stream);
void launch_low_latency(const CudaLowLatencyCombine& params, LaunchedHalves halves, int blocks, const DeviceLimits& limits,
                        gpu::Stream stream);

}  // namespace switchyard::detail

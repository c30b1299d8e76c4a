// SPDX-License-Identifier: Apache-2.0
// The kernels of low-latency mode over several hosts, as the host sees them: the phases of a call, between which NCCL's kernels
// run. Functions as in exchange/low_latency/launch.hpp. A kernel waits for ranks of its own host only, and does nothing once
// the group has failed: then what a round brought is not to be read.
#pragma once

#include "exchange/gpu/hosts/round_watch.hpp"
#include "exchange/low_latency/launch.hpp"
#include "protocol/hosts/low_latency_phases.hpp"

namespace switchyard::detail {

struct CudaHostsDispatch {
  LowLatencyDispatchParams d;  ///< all but the epoch
  FarRails far;
  CrossedIds crossed;
  RoundWatch watch;
  LowLatencyState* state = nullptr;
  const int32_t* device_tokens = nullptr;
  int warps = kLowLatencyWarps;  ///< of each launch
};
struct CudaHostsCombine {
  PhasedCombineParams c;  ///< all but the epoch
  RoundWatch watch;
  LowLatencyState* state = nullptr;
  int warps = kLowLatencyWarps;  ///< of each launch
};

/// Which phases a launch does, of the two that lie on one side of the round.
struct LaunchedPhases {
  bool first = true, second = true;
};
inline void set_idle(LaunchedPhases& phases, const IdleCall&) { phases = {true, false}; }

/// Before the round: the messages for this host, and those that cross.
void launch_send(const CudaHostsDispatch& params, int blocks, const DeviceLimits& limits, gpu::Stream stream);
/// Behind it. First: sends on what came. Second: waits for all messages, places them, and ends the call.
void launch_deliver(const CudaHostsDispatch& params, LaunchedPhases phases, int blocks, gpu::Stream stream);

/// Before the round. First: gives rows back, to owners of this host and to those who stand for others. Second: collects what is
/// given for ranks that this one stands for.
void launch_give(const CudaHostsCombine& params, LaunchedPhases phases, int blocks, gpu::Stream stream);
/// Behind it. First: tells who has entered the call. Second: sums what has come back, and ends the call.
void launch_sum(const CudaHostsCombine& params, LaunchedPhases phases, int blocks, gpu::Stream stream);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Host interface of the low-latency kernels for several hosts: the phases of a call, between which NCCL's kernels run. The
// functions follow the conventions of exchange/low_latency/launch.hpp. A kernel waits only for ranks of its own host and does
// nothing once the group has failed, because the data of a round must then not be read.
#pragma once

#include "exchange/hosts/round_watch.hpp"
#include "exchange/low_latency/launch.hpp"
#include "protocol/hosts/low_latency_phases.hpp"

namespace switchyard::detail {

struct CudaHostsDispatch {
  LowLatencyDispatchParams d;  ///< without the epoch
  RemoteRails remote;
  CrossedIds crossed;
  RoundWatch watch;
  LowLatencyState* state = nullptr;
  const int32_t* device_tokens = nullptr;
  const uint32_t* map_version = nullptr;  ///< as in CudaLowLatencyDispatch
  int warps = kLowLatencyWarps;           ///< of each launch
};
struct CudaHostsCombine {
  PhasedCombineParams c;  ///< without the epoch
  RoundWatch watch;
  LowLatencyState* state = nullptr;
  int warps = kLowLatencyWarps;  ///< of each launch
};

/// Selects which of the two phases on one side of the round a launch performs.
struct LaunchedPhases {
  bool first = true, second = true;
};
inline void set_idle(LaunchedPhases& phases, const IdleCall&) { phases = {true, false}; }

/// Before the round: sends the messages for this host and packs those for other hosts.
void launch_send(const CudaHostsDispatch& params, int blocks, const DeviceLimits& limits, gpu::Stream stream);
/// After the round. First phase: forwards received messages. Second phase: waits for all messages, places them and ends the
/// call.
void launch_deliver(const CudaHostsDispatch& params, LaunchedPhases phases, int blocks, gpu::Stream stream);

/// Before the round. First phase: returns rows to owners on this host and to proxies of other owners. Second phase: collects
/// the rows returned for the ranks for which this rank is the proxy.
void launch_give(const CudaHostsCombine& params, LaunchedPhases phases, int blocks, gpu::Stream stream);
/// After the round. First phase: announces the ranks that have entered the call. Second phase: sums returned rows and ends the
/// call.
void launch_sum(const CudaHostsCombine& params, LaunchedPhases phases, int blocks, gpu::Stream stream);

}  // namespace switchyard::detail

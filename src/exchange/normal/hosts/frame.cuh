// SPDX-License-Identifier: Apache-2.0
// Prologue and epilogue of kernels for calls over several hosts. Objects are never halted in such calls: the host waits for all
// placements and thus knows a call's outcome at once.
#pragma once

#include "arch/cuda/cuda_hosts.cuh"
#include "exchange/hosts/frame.cuh"
#include "exchange/normal/hosts/complete.cuh"
#include "exchange/normal/hosts/launch.hpp"

namespace switchyard::detail {

/// Adds the epoch to `call`, which is in shared memory. Call first, from all threads of a block. Returns false if the group has
/// failed, according to load_abort_words().
__device__ inline bool begin_hosts_block(const CallContext& args, const ObjectState* state, CallContext& call) {
  uint64_t abort = 0, epoch = 0;
  if (threadIdx.x == 0) {
    abort = load_abort_words(args);
    epoch = epoch_after(state->epoch);
  }
  const bool failed = __syncthreads_or(abort != 0);
  if (threadIdx.x == 0) call.epoch = epoch;
  if (abort != 0) report_abort(args, abort, epoch);
  __syncthreads();
  return !failed;
}

/// Last step of a call's last kernel. Call from one warp.
__device__ inline void end_hosts_call(ObjectState* state, uint64_t epoch) {
  if (threadIdx.x % kLanes == 0) state->epoch = epoch;
}

}  // namespace switchyard::detail

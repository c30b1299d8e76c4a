// SPDX-License-Identifier: Apache-2.0
// How kernels of a call begin, and the grid of their launch.
#pragma once

#include "arch/cuda/cuda_arch.cuh"
#include "exchange/gpu/kernel.hpp"
#include "exchange/gpu/state.hpp"
#include "protocol/call.hpp"

namespace switchyard::detail {

/// Copies `given` to the block's shared memory. All threads.
template <class T>
__device__ void copy_to_shared(const T& given, T& shared) {
  static_assert(sizeof(T) % 8 == 0 && std::is_trivially_copyable_v<T>);
  for (unsigned i = threadIdx.x; i < sizeof(T) / 8; i += blockDim.x)
    reinterpret_cast<uint64_t*>(&shared)[i] = reinterpret_cast<const uint64_t*>(&given)[i];
}

/// One thread, if the group has failed, which `abort` says: if no other block did it before, tells the host what ended this
/// call. It waited for nobody, so the record names no awaited rank: that may be this very rank.
__device__ __noinline__ inline void report_abort(const CallContext& given, uint64_t abort, uint64_t epoch) {
  if (given.operation == Operation::none) return;
  if (ptx::add_acq_rel<Scope::device>(given.fault_claims, 1) != 0) return;
  FaultRecord fault;
  fault.operation = given.operation;
  fault.aborted = true;
  fault.seen_abort = abort;
  fault.epoch = epoch;
  *given.fault = fault;
  ptx::store_release<Scope::system>(&given.fault->ready, 1);
}

/// What a call begins with, in one thread of each block, which asks for it early and uses it late.
struct CallWords {
  uint64_t abort = 0, epoch = 0;
};
__device__ inline CallWords load_call_words(const CallContext& given, const EpochState* state) {
  CallWords words;
  if (threadIdx.x != 0) return words;
  words.abort = ptx::load_relaxed<Scope::system>(given.abort_word);
  words.epoch = ptx::load_relaxed<Scope::device>(&state->epoch);
  return words;
}

/// All threads of a block: completes `call` (in shared memory, already copied by copy_to_shared) with the epoch. False if the
/// group has failed: the block returns at once, so N queued calls cost one deadline, and the host learns of it. For calls whose
/// last launch knows that it is the last when it begins: if this one `ends_call`, the last block to read the epoch advances it.
/// The last warp does so, while the others go on.
__device__ inline bool begin_block(const CallContext& given, const CallWords& words, EpochState* state, bool ends_call,
                                   CallContext& call) {
  if (threadIdx.x == 0) {
    call.epoch = epoch_after(words.epoch);
    if (words.abort != 0) report_abort(given, words.abort, call.epoch);
  }
  const bool failed = __syncthreads_or(words.abort != 0);
  if (ends_call && threadIdx.x + kLanes == blockDim.x && ptx::add_acq_rel<Scope::device>(&state->readers, 1) + 1 == gridDim.x) {
    state->readers = 0;
    state->epoch = call.epoch;
  }
  return !failed;
}

/// Of a launch of `shape`.
inline Grid grid_of(int blocks, const CudaShape& shape, bool dependent = false) {
  return {blocks, shape.warps * kLanes, shape.shared_bytes(), dependent};
}
inline void set_idle(CudaShape& shape, const IdleCall&) { shape = CudaShape{shape.warps, 0, 0, 0}; }

}  // namespace switchyard::detail

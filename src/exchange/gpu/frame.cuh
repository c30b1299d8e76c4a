// SPDX-License-Identifier: Apache-2.0
// Prologue of a call's kernels, and the grid for launching them.
#pragma once

#include "arch/cuda/cuda_arch.cuh"
#include "exchange/gpu/kernel.hpp"
#include "exchange/gpu/state.hpp"
#include "protocol/call.hpp"

namespace switchyard::detail {

/// Copies `args` to the block's shared memory. Call from all threads.
template <class T>
__device__ void copy_to_shared(const T& args, T& shared) {
  static_assert(sizeof(T) % 8 == 0 && std::is_trivially_copyable_v<T>);
  for (unsigned i = threadIdx.x; i < sizeof(T) / 8; i += blockDim.x)
    reinterpret_cast<uint64_t*>(&shared)[i] = reinterpret_cast<const uint64_t*>(&args)[i];
}

/// Reports the group's failure to the host, once per call. Call from one thread; `abort` is the abort word. The record names no
/// awaited rank because the call waited for none (the failed rank may be this one). Inline, for kernels in which a function
/// call would take registers from the multiplying warps; other kernels call report_abort().
__device__ __forceinline__ void report_abort_inline(const CallContext& args, uint64_t abort, uint64_t epoch) {
  if (args.operation == Operation::none) return;
  if (ptx::add_acq_rel<Scope::device>(args.fault_claims, 1) != 0) return;
  FaultRecord fault;
  fault.operation = args.operation;
  fault.aborted = true;
  fault.seen_abort = abort;
  fault.epoch = epoch;
  *args.fault = fault;
  ptx::store_release<Scope::system>(&args.fault->ready, 1);
}

__device__ __noinline__ inline void report_abort(const CallContext& args, uint64_t abort, uint64_t epoch) {
  report_abort_inline(args, abort, epoch);
}

/// Adds `n` > 0 to the object's count of invalid ids and notifies the host if necessary. Call from one thread.
__device__ __noinline__ inline void add_invalid_ids(const CallContext& call, uint64_t n) {
  if (call.invalid_ids == nullptr) return;
  ptx::add_acq_rel<Scope::device>(&reinterpret_cast<InvalidIdCounts*>(call.invalid_ids)->total, n);
  if (call.invalid_bell != nullptr) ptx::store_release<Scope::system>(call.invalid_bell, 1);
}

/// The words that every call reads first. One thread of each block loads them early and uses them late.
struct CallWords {
  uint64_t abort = 0, epoch = 0;
};
__device__ inline CallWords load_call_words(const CallContext& args, const EpochState* state) {
  CallWords words;
  if (threadIdx.x != 0) return words;
  words.abort = ptx::load_relaxed<Scope::system>(args.abort_word);
  words.epoch = ptx::load_relaxed<Scope::device>(&state->epoch);
  return words;
}

/// Adds the epoch to `call` (in shared memory, already filled by copy_to_shared). Call from all threads of a block. Returns
/// false if the group has failed: this is reported to the host, and the block must return at once, so that N queued calls cost
/// one deadline. `ends_call`: whether this launch is the last one of its call. In the last launch, the last block to read the
/// epoch advances it in its last warp while its other warps continue.
__device__ inline bool begin_block(const CallContext& args, const CallWords& words, EpochState* state, bool ends_call,
                                   CallContext& call) {
  if (threadIdx.x == 0) {
    call.epoch = epoch_after(words.epoch);
    if (words.abort != 0) report_abort(args, words.abort, call.epoch);
  }
  const bool failed = __syncthreads_or(words.abort != 0);
  if (ends_call && threadIdx.x + kLanes == blockDim.x && ptx::add_acq_rel<Scope::device>(&state->readers, 1) + 1 == gridDim.x) {
    state->readers = 0;
    state->epoch = call.epoch;
  }
  return !failed;
}

/// Grid for a launch of `shape`.
inline Grid grid_of(int blocks, const CudaShape& shape, bool dependent = false) {
  return {blocks, shape.warps * kLanes, shape.shared_bytes(), dependent};
}
inline void set_idle(CudaShape& shape, const IdleCall&) { shape = CudaShape{shape.warps, 0, 0, 0}; }

}  // namespace switchyard::detail

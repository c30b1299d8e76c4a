// SPDX-License-Identifier: Apache-2.0
// Prologue and epilogue of every normal-mode kernel, including objects halted by another rank's fault and calls that move
// nothing.
#pragma once

#include "arch/cuda/cuda_arch.cuh"
#include "exchange/gpu/frame.cuh"
#include "exchange/normal/launch.hpp"
#include "protocol/counts.hpp"

namespace switchyard::detail {

/// Decides whether a call on a halted object runs. Call from one thread of each block. The first block's decision applies to
/// all blocks and kernels of the call, because the host may detect the fault while replays are starting.
__device__ __noinline__ inline Verdict judge_halted(const RankWords& words, ObjectState* state, uint64_t halted) {
  const uint64_t heard = words.heard_now != nullptr ? ptx::load_relaxed<Scope::device>(words.heard_now) : words.heard;
  const auto found = static_cast<unsigned long long>(heard >= halted ? Verdict::proceeds : Verdict::is_skipped);
  const auto before = atomicCAS(reinterpret_cast<unsigned long long*>(&state->verdict), 0ull, found);
  return static_cast<Verdict>(before != 0 ? before : found);
}

/// Adds the epoch to `call` (in shared memory, already filled by copy_to_shared). Call first, from all threads of a block.
/// Returns false if the group has failed: this is reported to the host, and the block must return at once, so that N queued
/// calls cost one deadline. `participation`: in shared memory. `handle`: for calls that use the handle of an earlier dispatch,
/// its tables; otherwise null. All words are loaded concurrently.
__device__ inline bool begin_block(const CallContext& args, const RankWords& words, ObjectState* state, CallContext& call,
                                   Participation& participation, const TablesHeader* handle = nullptr) {
  uint64_t abort = 0, epoch = 0, halted = 0;
  int32_t moved = 1;
  if (threadIdx.x == 0) {
    abort = ptx::load_relaxed<Scope::system>(args.abort_word);
    epoch = epoch_after(state->epoch);
    halted = state->halted_by;
    if (handle != nullptr) moved = handle->moved;
  }
  const bool failed = __syncthreads_or(abort != 0);
  if (threadIdx.x == 0) {
    call.epoch = epoch;
    participation = Participation::takes_part;
    if (halted != 0)
      participation =
          judge_halted(words, state, halted) == Verdict::proceeds ? Participation::resumes : Participation::left_out;
    if (moved == 0 && participation != Participation::left_out) participation = Participation::unmoved;
  }
  if (abort != 0) report_abort(args, abort, epoch);
  __syncthreads();
  return !failed;
}

__device__ inline bool takes_part(Participation participation) { return participation <= Participation::resumes; }

/// Last step of the last kernel of a call that did not fail. Call from one warp after all warps have read the epoch. All values
/// are arguments because a load here would delay the next call.
__device__ inline void end_call(ObjectState* state, uint64_t epoch, Participation participation) {
  if (threadIdx.x % kLanes != 0) return;
  state->epoch = epoch;
  if (participation != Participation::resumes) return;
  state->halted_by = 0;
  state->verdict = 0;
}

/// Reports to the host a fault that ends only this call, unless the host has not yet read an earlier one. Call from one thread.
__device__ inline void report_soft_fault(SoftFault* to, const SoftFault& fault) {
  if (to == nullptr || ptx::load_acquire<Scope::system>(&to->ready) != 0) return;
  to->code = fault.code;
  to->rank = fault.rank;
  to->epoch = fault.epoch;
  to->needed = fault.needed;
  to->capacity = fault.capacity;
  to->left_out = fault.left_out;
  to->number = fault.number;
  ptx::store_release<Scope::system>(&to->ready, 1);
}

/// Call after all placements have arrived; true if all ranks can take part and have made the same call. A mismatch is recorded
/// and sticky; a rank without room is not a fault (see end_unmoved). Call from one or more warps; all get the same result.
__device__ inline bool placements_agree(CudaWarp& w, const CallContext& call, const ControlLayout& control,
                                        uint64_t signature) {
  if (all_agree<Cuda>(w, call, control, signature)) return true;
  if (w.index() != 0) return false;
  for (int r = 0; r < call.world(); ++r) {
    const Placement& place = *call.heap.local(control.placement(call.epoch, r));
    if (place.signature != signature || !reachable(call, place))
      return record_mismatch<Cuda>(w, call, Site::placement, r, signature, place.signature);
  }
  return false;
}

/// Last step, in place of end_call, of a call in which some rank's placement reports that the rank had no room. Call from one
/// warp. If the rank without room is this one (`soft` is null), its host has already detected this; otherwise, the fault is
/// reported to the host and the object is halted. \returns the placement of the rank without room, or null
__device__ inline const Placement* end_unmoved(const CallContext& call, const RankWords& words, const ControlLayout& control,
                                               ObjectState* state, Participation participation, SoftFault* soft,
                                               int& failed_rank) {
  const Placement* failed = nullptr;
  for (int r = 0; r < call.world() && failed == nullptr; ++r) {
    const Placement* place = call.heap.local(control.placement(call.epoch, r));
    if (place->status == 0) continue;
    failed = place;
    failed_rank = r;
  }
  end_call(state, call.epoch, participation);
  if (threadIdx.x % kLanes != 0 || failed == nullptr || soft == nullptr) return failed;
  const auto code = static_cast<int32_t>(failed->status);
  const uint64_t number = ptx::add_acq_rel<Scope::device>(words.fault_numbers, 1) + 1;
  state->halted_by = number;
  state->halted_epoch = call.epoch;
  state->halted_code = code;
  state->halted_rank = failed_rank;
  report_soft_fault(soft, SoftFault{0, code, failed_rank, call.epoch, 0, 0, 0, number});
  return failed;
}

/// Reports that the call does nothing because this object is halted. Call from one thread.
__device__ inline void report_left_out(const CallContext& call, const ObjectState& state, SoftFault* soft) {
  report_soft_fault(soft, SoftFault{0, state.halted_code, state.halted_rank, state.halted_epoch, 0, 0,
                                    static_cast<uint64_t>(call.operation), state.halted_by});
}

/// Last step of a call's last kernel if the call does not take part; such a call is not counted. Call from all threads of all
/// blocks.
__device__ __noinline__ inline void do_nothing(const CallContext& call, Participation participation, const TablesHeader& header,
                                               ObjectState* state, SoftFault* soft) {
  if (threadIdx.x % kLanes == 0) call.moved[blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes] = MoveCounter{};
  if (threadIdx.x != 0) return;
  if (participation == Participation::left_out) {
    if (blockIdx.x == 0) report_left_out(call, *state, soft);
    if (ptx::add_acq_rel<Scope::device>(&state->leavers, 1) + 1 == gridDim.x) {
      state->leavers = 0;
      state->verdict = 0;
    }
  } else if (blockIdx.x == 0) {
    report_soft_fault(
        soft, SoftFault{0, header.status, header.failed_rank, header.epoch, 0, 0, static_cast<uint64_t>(call.operation), 0});
  }
}

/// Shared memory for a block of `warps` warps that moves rows of `row_bytes` bytes, in addition to `static_bytes` of static
/// shared memory. `stages` per warp, or one if there is no room for more; 0 means two if whole rows fit twice, otherwise one.
inline CudaShape move_shape(int warps, int64_t row_bytes, uint32_t scratch_bytes, size_t static_bytes, uint32_t shared_bytes,
                            int stages = 0) {
  const auto available = shared_bytes - static_cast<uint32_t>(static_bytes) - 1024;
  const auto fitted = [&](int n) {
    return fit_cuda_shape(warps, n, static_cast<uint64_t>(row_bytes), scratch_bytes, available);
  };
  if (stages == 0) return fitted(row_bytes * 2 * warps <= available ? 2 : 1);
  const CudaShape shape = fitted(stages);
  return shape.stage_bytes > 0 ? shape : fitted(1);
}

}  // namespace switchyard::detail

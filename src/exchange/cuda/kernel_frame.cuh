// SPDX-License-Identifier: Apache-2.0
// How every kernel of a call begins and ends.
#pragma once

#include "arch/cuda/cuda_arch.cuh"
#include "exchange/cuda/device_tables.hpp"
#include "protocol/counts.hpp"

namespace switchyard::detail {

/// Copies `given` to the block's shared memory. All threads.
template <class T>
__device__ void copy_to_shared(const T& given, T& shared) {
  static_assert(sizeof(T) % 8 == 0 && std::is_trivially_copyable_v<T>);
  for (unsigned i = threadIdx.x; i < sizeof(T) / 8; i += blockDim.x)
    reinterpret_cast<uint64_t*>(&shared)[i] = reinterpret_cast<const uint64_t*>(&given)[i];
}

/// The next kernel of the stream, if it was launched as dependent, may start its blocks; it waits before it reads anything.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Waits until the kernel before has ended and its stores are visible. Nothing to wait for unless launched as its dependent.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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

/// All threads of a block, first thing: completes `call` (in shared memory, already copied by copy_to_shared) with the epoch.
/// False if the group has failed: the block returns at once, so N queued calls cost one deadline, and the host learns of it.
__device__ inline bool begin_block(const CallContext& given, const ObjectState* state, CallContext& call) {
  uint64_t abort = 0, epoch = 0;
  if (threadIdx.x == 0) {
    abort = ptx::load_relaxed<Scope::system>(given.abort_word);
    epoch = (state->epoch + 1) & (~uint64_t{0} >> kFlagValueBits);
  }
  const bool failed = __syncthreads_or(abort != 0);
  if (threadIdx.x == 0) call.epoch = epoch;
  if (abort != 0) report_abort(given, abort, epoch);
  __syncthreads();
  return !failed;
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

/// As begin_block, for calls whose last launch knows that it is the last when it begins: if this one `ends_call`, the last
/// block to read the epoch advances it. The last warp does so, while the others go on.
__device__ inline bool begin_block(const CallContext& given, const CallWords& words, EpochState* state, bool ends_call,
                                   CallContext& call) {
  if (threadIdx.x == 0) {
    call.epoch = (words.epoch + 1) & (~uint64_t{0} >> kFlagValueBits);
    if (words.abort != 0) report_abort(given, words.abort, call.epoch);
  }
  const bool failed = __syncthreads_or(words.abort != 0);
  if (ends_call && threadIdx.x + kLanes == blockDim.x && ptx::add_acq_rel<Scope::device>(&state->readers, 1) + 1 == gridDim.x) {
    state->readers = 0;
    state->epoch = call.epoch;
  }
  return !failed;
}

/// One warp, last thing in the last kernel of a call that did not fail, after all warps have read the epoch.
__device__ inline void end_call(ObjectState* state, uint64_t epoch) {
  if (threadIdx.x % kLanes == 0) state->epoch = epoch;
}

/// One thread: tells the host of a fault that ends this call only, unless it has not yet taken an earlier one.
__device__ inline void report_soft_fault(SoftFault* to, const SoftFault& fault) {
  if (to == nullptr || ptx::load_acquire<Scope::system>(&to->ready) != 0) return;
  to->code = fault.code;
  to->rank = fault.rank;
  to->epoch = fault.epoch;
  to->needed = fault.needed;
  to->capacity = fault.capacity;
  ptx::store_release<Scope::system>(&to->ready, 1);
}

/// After all placements have come: true if all ranks can take part and made the same call. Otherwise one block's first thread
/// reports why: a mismatch is sticky, a rank without room is not. One warp or more, same answer everywhere.
__device__ inline bool placements_agree(CudaWarp& w, const CallContext& call, const ControlLayout& control, uint64_t signature,
                                        SoftFault* soft) {
  if (all_agree<Cuda>(w, call, control, signature)) return true;
  if (w.index() != 0) return false;
  for (int r = 0; r < call.world(); ++r) {
    const Placement& place = *call.heap.local(control.placement(call.epoch, r));
    if (place.signature != signature || !reachable(call, place)) return record_mismatch<Cuda>(w, call, Site::placement, r);
    if (place.status == 0) continue;
    if (threadIdx.x == 0) report_soft_fault(soft, SoftFault{0, static_cast<int32_t>(place.status), r, call.epoch, 0, 0});
    return false;
  }
  return false;
}

/// Shared memory of a block of `warps` that moves rows of `row_bytes` besides `static_bytes` of its own. `stages` per warp, one
/// if there is no room for more; 0: two if whole rows fit twice, else one.
inline CudaShape move_shape(int warps, int64_t row_bytes, uint32_t scratch_bytes, size_t static_bytes, uint32_t shared_bytes,
                            int stages = 0) {
  const auto room = shared_bytes - static_cast<uint32_t>(static_bytes) - 1024;
  const auto fitted = [&](int n) { return fit_cuda_shape(warps, n, static_cast<uint64_t>(row_bytes), scratch_bytes, room); };
  if (stages == 0) return fitted(row_bytes * 2 * warps <= room ? 2 : 1);
  const CudaShape shape = fitted(stages);
  return shape.stage_bytes > 0 ? shape : fitted(1);
}

void check_cuda(cudaError_t status, const char* what);

/// Launches `kernel` on `blocks` blocks; `overlapped`: as the dependent of the kernel before on the stream.
template <class... Given>
cudaError_t launch_status(void (*kernel)(Given...), int blocks, const CudaShape& shape, bool overlapped, cudaStream_t stream,
                          const std::type_identity_t<Given>&... given) {
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.warps * kLanes));
  config.dynamicSmemBytes = shape.shared_bytes();
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = overlapped ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, given...);
}
/// The same; a failure is Error(system) naming the kernel.
template <class... Given>
void launch_kernel(void (*kernel)(Given...), int blocks, const CudaShape& shape, bool overlapped, cudaStream_t stream,
                   const char* name, const std::type_identity_t<Given>&... given) {
  check_cuda(launch_status(kernel, blocks, shape, overlapped, stream, given...), name);
}

/// Lets `kernel` have `bytes` of dynamic shared memory, and loads it.
template <class Kernel>
cudaError_t allow_shared_status(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
  check_cuda(allow_shared_status(kernel, bytes), "cudaFuncSetAttribute");
}

}  // namespace switchyard::detail

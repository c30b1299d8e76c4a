// SPDX-License-Identifier: Apache-2.0
// The ledger combine kernel: protocol/ledger/combine.hpp with one block per multiprocessor.
//
// Progress: a warp returns its share of the rows before it waits, and it waits only for the returns of other ranks. All blocks
// must be able to run concurrently, because a block that has not started has not returned anything. The launcher therefore
// limits the grid to one block per multiprocessor. Other kernels may delay a block as long as they end.
#include <type_traits>

#include "arch/cuda/cuda_traced.cuh"
#include "exchange/gpu/frame.cuh"
#include "exchange/ledger/launch.hpp"

namespace switchyard::detail {

namespace {

struct KnownLedgerLayout : LedgerLayout {
  static constexpr SWITCHYARD_FN bool has_sentinel_rows() { return true; }
};

/// Parameters for rows of a single type that CudaInline can move.
template <DType kType>
struct KnownLedger : LedgerParams {
  static constexpr DType type = kType;
  KnownLedgerLayout layout;

  static bool holds(const LedgerParams& p) {
    const auto whole = [&](const void* rows) { return (reinterpret_cast<uintptr_t>(rows) | p.row_bytes) % 16 == 0; };
    return p.type == kType && p.topk <= 32 && p.call.world() <= 32 && whole(p.y) && whole(p.out);
  }
};

}  // namespace

namespace ledger {

template <class A, class P>
__global__ void __launch_bounds__(kLedgerWarps* kLanes, 1)
    combine_kernel(const __grid_constant__ CudaLedgerParams args, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(P)];
  P& p = *reinterpret_cast<P*>(params);
  const CallWords words = load_call_words(args.l.call, args.state);
  copy_to_shared(args.l, static_cast<LedgerParams&>(p));
  if constexpr (!std::is_same_v<P, LedgerParams>) copy_to_shared(args.l.layout, static_cast<LedgerLayout&>(p.layout));
  __syncthreads();
  if (!begin_block(args.l.call, words, args.state, true, p.call)) return;
  CudaWarp w(dynamic_shared, shape);
  const KernelTrace<A> trace(w, p.call.device_trace, Event::ledger_combine, pack_launch(p.call.epoch, args.state, p.tokens));
  (void)ledger_combine<A>(w, p);
  A::settle(w);
}

}  // namespace ledger

namespace {

template <class A, class P>
const Kernel<const CudaLedgerParams, const CudaShape> combines("ledger kernel", ledger::combine_kernel<A, P>,
                                                               kLedgerWarps* kLanes, [](const DeviceLimits& limits) {
                                                                 return static_cast<int>(limits.shared_bytes) -
                                                                        static_cast<int>(sizeof(LedgerParams)) - 1024;
                                                               });

template <class A, class P = LedgerParams>
const auto& kernel_of(bool traced) {
  return traced ? combines<TracedArch<A>, P> : combines<A, P>;
}

/// Sentinel rows in f16 and bf16 share one kernel (docs/design/0011). Other rows arrive earlier without staging in shared
/// memory if there are few chunks, i.e. at most one part per warp.
const auto& kernel_for(const CudaLedgerParams& p, int blocks) {
  const bool traced = p.l.call.device_trace.records != nullptr;
  if (KnownLedger<DType::bf16>::holds(p.l)) return kernel_of<CudaInline, KnownLedger<DType::bf16>>(traced);
  if (KnownLedger<DType::f16>::holds(p.l)) return kernel_of<CudaInline, KnownLedger<DType::f16>>(traced);
  return p.l.num_chunks * kChunkParts > int64_t{blocks} * p.warps ? kernel_of<Cuda>(traced) : kernel_of<CudaLanes>(traced);
}

/// Gives each warp space for one part of a default-sized chunk, or for one row. Longer parts are copied in pieces.
CudaShape ledger_shape(int warps, int64_t row_bytes, const DeviceLimits& limits) {
  constexpr int64_t kDefaultPartBytes = (int64_t{kDefaultChunkKib} << 10) / kChunkParts;
  const auto available = limits.shared_bytes - static_cast<uint32_t>(sizeof(LedgerParams)) - 1024;
  return fit_cuda_shape(warps, 1, static_cast<uint64_t>(row_bytes > kDefaultPartBytes ? row_bytes : kDefaultPartBytes), 0,
                        available);
}

}  // namespace

void launch_ledger(const CudaLedgerParams& p, int blocks, const DeviceLimits& limits, gpu::Stream stream) {
  const CudaShape shape = ledger_shape(p.warps, p.l.row_bytes, limits);
  kernel_for(p, blocks).launch(grid_of(blocks, shape), stream, p, shape);
}

}  // namespace switchyard::detail

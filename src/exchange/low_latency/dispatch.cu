// SPDX-License-Identifier: Apache-2.0
// The dispatch kernels of low-latency mode: protocol/low_latency/dispatch.hpp with one block per multiprocessor.
//
// Progress: all warps of a rank send before they wait, and they wait only for sends by other ranks. All blocks of a launch that
// receives must be able to run concurrently, because a block that has not started has not sent anything. The launcher therefore
// limits the grid to one block per multiprocessor. Other kernels may delay a block as long as they end.
#include "exchange/low_latency/known.cuh"

namespace switchyard::detail {

namespace low_latency {

template <class A, class P>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    dispatch_kernel(const __grid_constant__ CudaLowLatencyDispatch args, const __grid_constant__ CudaShape shape,
                    const LaunchedHalves halves) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(P)];
  ptx::launch_dependents();
  P& p = *reinterpret_cast<P*>(params);
  ptx::wait_for_previous();
  const CallWords words = load_call_words(args.d.call, args.state);
  EarlyIds ids{};
  if (halves.send) ids = load_ids(args.d.ids, static_cast<int>(threadIdx.x), args.d.tokens * args.d.layout.topk);
  CudaWarp w(dynamic_shared, shape);
  const int tokens = tokens_now(args.d.tokens, args.device_tokens);
  if (halves.send) prefetch_first_part(w, args.d, tokens);
  share_params(args.d, p);
  if (halves.send) clear_sets(args.d, dynamic_shared, shape);
  __syncthreads();
  fence_entry(w);
  if (halves.send) stage_sending(args.d, ids, tokens, dynamic_shared, shape, p);
  if (!begin_block(args.d.call, words, args.state, halves.receive, p.call)) return;
  const KernelTrace<A> trace(w, p.call.device_trace, Event::dispatch, pack_launch(p.call.epoch, args.state, tokens));
  if (halves.send) low_latency_send<A>(w, p);
  if (halves.receive) (void)low_latency_receive<A>(w, p);
  A::settle(w);
}

}  // namespace low_latency

namespace {

/// One kernel per kind of parameters, each with and without tracing; the general parameters come last.
template <class A, class P>
const Kernel<const CudaLowLatencyDispatch, const CudaShape, const LaunchedHalves> dispatches("low-latency dispatch kernel",
                                                                                             low_latency::dispatch_kernel<A, P>,
                                                                                             kLowLatencyWarps* kLanes,
                                                                                             max_low_latency_shared);

template <class P>
const auto& kernel_of(bool traced) {
  return traced ? dispatches<TracedArch<ArchOf<P>>, P> : dispatches<ArchOf<P>, P>;
}

using Fp8Rows = KnownDispatch<ScaleKind::f32>;
using Fp8Columns = KnownDispatch<ScaleKind::f32, ScaleColumns>;
using Ue8m0Columns = KnownDispatch<ScaleKind::ue8m0, ScaleColumns>;
using CallerFp8 = KnownDispatch<ScaleKind::none, ScalePlace, DType::fp8_e4m3>;
using AsIs = KnownDispatch<ScaleKind::none>;

const auto& kernel_for(const LowLatencyDispatchParams& p, bool ids_staged, bool traced) {
  if (!ids_staged) return kernel_of<LowLatencyDispatchParams>(traced);
  if (Fp8Rows::holds(p)) return kernel_of<Fp8Rows>(traced);
  if (Fp8Columns::holds(p)) return kernel_of<Fp8Columns>(traced);
  if (Ue8m0Columns::holds(p)) return kernel_of<Ue8m0Columns>(traced);
  if (CallerFp8::holds(p)) return kernel_of<CallerFp8>(traced);
  if (AsIs::holds(p)) return kernel_of<AsIs>(traced);
  return kernel_of<LowLatencyDispatchParams>(traced);
}

}  // namespace

// Every launch may begin while the previous kernel on the stream is finishing; it waits for that kernel before it reads
// anything.
void launch_low_latency(const CudaLowLatencyDispatch& p, LaunchedHalves halves, int blocks, const DeviceLimits& limits,
                        gpu::Stream stream) {
  const CudaShape shape = low_latency_shape(p.warps, p.d.tokens, p.d.layout.topk, p.d.layout.map.experts, limits);
  const auto& kernel = kernel_for(p.d, shape.block_bytes > 0, p.d.call.device_trace.records != nullptr);
  kernel.launch(grid_of(blocks, shape, limits.dependent_launches), stream, p, shape, halves);
}

}  // namespace switchyard::detail

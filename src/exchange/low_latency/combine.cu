// SPDX-License-Identifier: Apache-2.0
// The combine kernels of low-latency mode: protocol/low_latency/combine.hpp with one block per multiprocessor.
//
// Progress: as in dispatch.cu.
#include "exchange/low_latency/known.cuh"

namespace switchyard::detail {

namespace low_latency {

template <class A, class P>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    combine_kernel(const __grid_constant__ CudaLowLatencyCombine args, const __grid_constant__ CudaShape shape,
                   const LaunchedHalves halves) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(P)];
  ptx::launch_dependents();
  P& p = *reinterpret_cast<P*>(params);
  share_params(args.c, p);  // overlaps the end of the previous kernel
  ptx::wait_for_previous();
  const CallWords words = load_call_words(args.c.call, args.state);
  const uint64_t combined = load_combined(args.c);
  const IdReader own{args.c.own_ids, false, args.c.layout.map.experts};
  const int max = args.c.layout.max_tokens;
  EarlyIds ids{};
  if (halves.receive) ids = load_ids(own, static_cast<int>(threadIdx.x), max * args.c.layout.topk);
  CudaWarp w(dynamic_shared, shape);
  if (halves.send) prefetch_first_return(w, args.c);
  __syncthreads();
  fence_entry(w);
  if (halves.receive && shape.block_bytes > 0) {
    auto* const copy = reinterpret_cast<int32_t*>(dynamic_shared + shape.block_at());
    stage_ids(own, ids, max * args.c.layout.topk, copy, [](int32_t, int) {});
    if (threadIdx.x == 0) p.own_ids = copy;
  }
  if (threadIdx.x == 0) p.combined = combined;
  if (!begin_block(args.c.call, words, args.state, halves.receive, p.call)) return;
  const KernelTrace<A> trace(w, p.call.device_trace, Event::combine, pack_launch(p.call.epoch, args.state, args.c.own->tokens));
  if (halves.send) low_latency_return<A>(w, p);
  if (halves.receive) (void)low_latency_sum<A>(w, p);
  A::settle(w);
}

}  // namespace low_latency

namespace {

/// One kernel per kind of parameters, each with and without tracing; the general parameters come last.
template <class A, class P>
const Kernel<const CudaLowLatencyCombine, const CudaShape, const LaunchedHalves> combines("low-latency combine kernel",
                                                                                          low_latency::combine_kernel<A, P>,
                                                                                          kLowLatencyWarps* kLanes,
                                                                                          max_low_latency_shared);

template <class P>
const auto& kernel_of(bool traced) {
  return traced ? combines<TracedArch<ArchOf<P>>, P> : combines<ArchOf<P>, P>;
}

const auto& kernel_for(const LowLatencyCombineParams& p, bool traced) {
  using PerRoute = KnownCombine<CombineOrder::per_route>;
  using PerRank = KnownCombine<CombineOrder::per_rank>;
  if (PerRoute::holds(p)) return kernel_of<PerRoute>(traced);
  if (PerRank::holds(p)) return kernel_of<PerRank>(traced);
  return kernel_of<LowLatencyCombineParams>(traced);
}

}  // namespace

// Every launch may begin while the previous kernel on the stream is finishing; it waits for that kernel before it reads
// anything.
void launch_low_latency(const CudaLowLatencyCombine& p, LaunchedHalves halves, int blocks, const DeviceLimits& limits,
                        gpu::Stream stream) {
  const CudaShape shape = low_latency_shape(p.warps, p.c.layout.max_tokens, p.c.layout.topk, 0, limits);
  const auto& kernel = kernel_for(p.c, p.c.call.device_trace.records != nullptr);
  kernel.launch(grid_of(blocks, shape, limits.dependent_launches), stream, p, shape, halves);
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Low-latency mode as kernels: protocol/low_latency_*.hpp over blocks of one multiprocessor each.
//
// Progress: all warps of a rank send before they wait, and wait for remote sends only. All blocks of a launch that receives
// must be able to run at the same time, because a block that has not begun has not sent: the launcher keeps the grid to one
// block per multiprocessor. Other kernels may delay a block, as long as they end.
#include <type_traits>

#include "exchange/cuda/flat_kernel.cuh"
#include "exchange/cuda/low_latency_known.cuh"

namespace switchyard::detail {

namespace {

template <class A, class P>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    low_latency_dispatch_kernel(const __grid_constant__ CudaLowLatencyDispatch given, const __grid_constant__ CudaShape shape,
                                const LaunchedHalves halves) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(P)];
  launch_dependents();
  P& p = *reinterpret_cast<P*>(params);
  wait_for_previous();
  const CallWords words = load_call_words(given.d.call, given.state);
  EarlyIds ids{};
  if (halves.send) ids = load_ids(given.d.ids, static_cast<int>(threadIdx.x), given.d.tokens * given.d.layout.topk);
  CudaWarp w(dynamic_shared, shape);
  const int tokens = tokens_now(given.d.tokens, given.device_tokens);
  if (halves.send) prefetch_first_part(w, given.d, tokens);
  share_params(given.d, p);
  if (halves.send) clear_sets(given.d, dynamic_shared, shape);
  __syncthreads();
  fence_entry(w);
  if (halves.send) stage_sending(given.d, ids, tokens, dynamic_shared, shape, p);
  if (!begin_block(given.d.call, words, given.state, halves.receive, p.call)) return;
  const KernelTrace<A> trace(w, p.call.device_trace, Event::dispatch, pack_launch(p.call.epoch, given.state, tokens));
  if (halves.send) low_latency_send<A>(w, p);
  if (halves.receive) (void)low_latency_receive<A>(w, p);
  A::settle(w);
}

template <class A, class P>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    low_latency_combine_kernel(const __grid_constant__ CudaLowLatencyCombine given, const __grid_constant__ CudaShape shape,
                               const LaunchedHalves halves) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(P)];
  launch_dependents();
  P& p = *reinterpret_cast<P*>(params);
  share_params(given.c, p);  // while the kernel before ends
  wait_for_previous();
  const CallWords words = load_call_words(given.c.call, given.state);
  const uint64_t combined = load_combined(given.c);
  const IdReader own{given.c.own_ids, false, given.c.layout.map.experts};
  const int most = given.c.layout.max_tokens;
  EarlyIds ids{};
  if (halves.receive) ids = load_ids(own, static_cast<int>(threadIdx.x), most * given.c.layout.topk);
  CudaWarp w(dynamic_shared, shape);
  if (halves.send) prefetch_first_return(w, given.c);
  __syncthreads();
  fence_entry(w);
  if (halves.receive && shape.block_bytes > 0) {
    auto* const copy = reinterpret_cast<int32_t*>(dynamic_shared + shape.block_at());
    stage_ids(own, ids, most * given.c.layout.topk, copy, [](int32_t, int) {});
    if (threadIdx.x == 0) p.own_ids = copy;
  }
  if (threadIdx.x == 0) p.combined = combined;
  if (!begin_block(given.c.call, words, given.state, halves.receive, p.call)) return;
  const KernelTrace<A> trace(w, p.call.device_trace, Event::combine,
                             pack_launch(p.call.epoch, given.state, given.c.own->tokens));
  if (halves.send) low_latency_return<A>(w, p);
  if (halves.receive) (void)low_latency_sum<A>(w, p);
  A::settle(w);
}

/// A kernel for each kind of parameters, the general ones last; each with tracing and without.
template <class P>
using ArchOf = std::conditional_t<std::is_same_v<P, LowLatencyDispatchParams> || std::is_same_v<P, LowLatencyCombineParams>,
                                  CudaLanes, CudaHot>;
int most_shared(const DeviceLimits& limits) { return static_cast<int>(limits.shared_bytes - kStaticShared); }

template <class A, class P>
const Kernel<const CudaLowLatencyDispatch, const CudaShape, const LaunchedHalves> dispatches("low-latency dispatch kernel",
                                                                                             low_latency_dispatch_kernel<A, P>,
                                                                                             kLowLatencyWarps* kLanes,
                                                                                             most_shared);
template <class A, class P>
const Kernel<const CudaLowLatencyCombine, const CudaShape, const LaunchedHalves> combines("low-latency combine kernel",
                                                                                          low_latency_combine_kernel<A, P>,
                                                                                          kLowLatencyWarps* kLanes,
                                                                                          most_shared);
template <class A, class P>
const Kernel<const CudaFlat, const CudaShape, const ScaledRows> flats("all-to-all kernel", flat_kernel<A, P, ScaledRows>,
                                                                      kLowLatencyWarps* kLanes, most_shared);

template <class P>
const auto& dispatch_kernel(bool traced) {
  return traced ? dispatches<TracedArch<ArchOf<P>>, P> : dispatches<ArchOf<P>, P>;
}
template <class P>
const auto& combine_kernel(bool traced) {
  return traced ? combines<TracedArch<ArchOf<P>>, P> : combines<ArchOf<P>, P>;
}

using Fp8Rows = KnownDispatch<ScaleKind::f32>;
using Fp8Columns = KnownDispatch<ScaleKind::f32, ScaleColumns>;
using Ue8m0Columns = KnownDispatch<ScaleKind::ue8m0, ScaleColumns>;
using GivenFp8 = KnownDispatch<ScaleKind::none, ScalePlace, DType::fp8_e4m3>;
using AsIs = KnownDispatch<ScaleKind::none>;

const auto& dispatch_kernel_for(const LowLatencyDispatchParams& p, bool ids_staged, bool traced) {
  if (!ids_staged) return dispatch_kernel<LowLatencyDispatchParams>(traced);
  if (Fp8Rows::holds(p)) return dispatch_kernel<Fp8Rows>(traced);
  if (Fp8Columns::holds(p)) return dispatch_kernel<Fp8Columns>(traced);
  if (Ue8m0Columns::holds(p)) return dispatch_kernel<Ue8m0Columns>(traced);
  if (GivenFp8::holds(p)) return dispatch_kernel<GivenFp8>(traced);
  if (AsIs::holds(p)) return dispatch_kernel<AsIs>(traced);
  return dispatch_kernel<LowLatencyDispatchParams>(traced);
}
const auto& combine_kernel_for(const LowLatencyCombineParams& p, bool traced) {
  using PerRoute = KnownCombine<CombineOrder::per_route>;
  using PerRank = KnownCombine<CombineOrder::per_rank>;
  if (PerRoute::holds(p)) return combine_kernel<PerRoute>(traced);
  if (PerRank::holds(p)) return combine_kernel<PerRank>(traced);
  return combine_kernel<LowLatencyCombineParams>(traced);
}

template <class P>
const auto& scaled_kernel(bool traced) {
  using A = std::conditional_t<std::is_same_v<P, FlatParams>, CudaLanes, CudaHot>;
  return traced ? flats<TracedArch<A>, P> : flats<A, P>;
}
const auto& scaled_kernel_for(const FlatParams& p, bool ids_staged, bool traced) {
  if (ids_staged && KnownFlat<DType::bf16>::holds(p)) return scaled_kernel<KnownFlat<DType::bf16>>(traced);
  if (ids_staged && KnownFlat<DType::f16>::holds(p)) return scaled_kernel<KnownFlat<DType::f16>>(traced);
  return scaled_kernel<FlatParams>(traced);
}

}  // namespace

// Every launch may begin while the kernel before it on the stream ends: it waits before it reads anything.
void launch_low_latency(const CudaLowLatencyDispatch& p, LaunchedHalves halves, int blocks, const DeviceLimits& limits,
                        gpu::Stream stream) {
  const CudaShape shape = low_latency_shape(p.warps, p.d.tokens, p.d.layout.topk, p.d.layout.map.experts, limits);
  const auto& kernel = dispatch_kernel_for(p.d, shape.block_bytes > 0, p.d.call.device_trace.records != nullptr);
  kernel.launch(grid_of(blocks, shape, limits.dependent_launches), stream, p, shape, halves);
}
void launch_low_latency(const CudaLowLatencyCombine& p, LaunchedHalves halves, int blocks, const DeviceLimits& limits,
                        gpu::Stream stream) {
  const CudaShape shape = low_latency_shape(p.warps, p.c.layout.max_tokens, p.c.layout.topk, 0, limits);
  const auto& kernel = combine_kernel_for(p.c, p.c.call.device_trace.records != nullptr);
  kernel.launch(grid_of(blocks, shape, limits.dependent_launches), stream, p, shape, halves);
}
void launch_low_latency(const CudaFlat& p, int blocks, const DeviceLimits& limits, gpu::Stream stream) {
  const CudaShape shape = low_latency_shape(p.warps, p.f.d.tokens, p.f.d.layout.topk, 0, limits);
  const auto& kernel = scaled_kernel_for(p.f, shape.block_bytes > 0, p.f.d.call.device_trace.records != nullptr);
  kernel.launch(grid_of(blocks, shape, limits.dependent_launches), stream, p, shape, ScaledRows{});
}

}  // namespace switchyard::detail

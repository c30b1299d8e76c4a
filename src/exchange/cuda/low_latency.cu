// SPDX-License-Identifier: Apache-2.0
// Low-latency mode as kernels: protocol/low_latency_*.hpp over blocks of one multiprocessor each.
//
// Progress: all warps of a rank send before they wait, and wait for remote sends only. All blocks of a launch that receives
// must be able to run at the same time, because a block that has not begun has not sent: the launcher keeps the grid to one
// block per multiprocessor. Other kernels may delay a block, as long as they end.
#include "exchange/cuda/flat_kernel.cuh"

namespace switchyard::detail {

namespace {

template <class A>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    low_latency_dispatch_kernel(const __grid_constant__ CudaLowLatencyDispatch given, const __grid_constant__ CudaShape shape,
                                const LaunchedHalves halves) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(LowLatencyDispatchParams)];
  auto& p = *reinterpret_cast<LowLatencyDispatchParams*>(params);
  launch_dependents();
  copy_to_shared(given.d, p);
  __syncthreads();
  wait_for_previous();
  CudaWarp w(dynamic_shared, shape);
  const int64_t tokens = tokens_now(given.d.tokens, given.device_tokens);
  if (halves.send) prefetch_first_piece(w, given.d, tokens);
  if (halves.send) stage_ids(given.d.ids, tokens, given.d.layout.topk, true, dynamic_shared, shape, p.ids);
  if (threadIdx.x == 0) p.tokens = tokens;
  if (!begin_block(given.d.call, given.state, halves.receive, p.call)) return;
  const KernelTrace<A> trace(w, p.call.device_trace);
  if (halves.send) low_latency_send<A>(w, p);
  if (halves.receive) (void)low_latency_receive<A>(w, p);
  A::settle(w);
}

template <class A>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    low_latency_combine_kernel(const __grid_constant__ CudaLowLatencyCombine given, const __grid_constant__ CudaShape shape,
                               const LaunchedHalves halves) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(LowLatencyCombineParams)];
  auto& p = *reinterpret_cast<LowLatencyCombineParams*>(params);
  launch_dependents();
  copy_to_shared(given.c, p);
  __syncthreads();
  wait_for_previous();
  CudaWarp w(dynamic_shared, shape);
  const IdReader own{given.c.own_ids, false, given.c.layout.map.experts};
  IdReader staged = own;
  if (halves.receive) stage_ids(own, given.c.layout.max_tokens, given.c.layout.topk, false, dynamic_shared, shape, staged);
  if (threadIdx.x == 0) p.own_ids = static_cast<const int32_t*>(staged.ids);
  if (!begin_block(given.c.call, given.state, halves.receive, p.call)) return;
  const KernelTrace<A> trace(w, p.call.device_trace);
  if (halves.send) low_latency_return<A>(w, p);
  if (halves.receive) (void)low_latency_sum<A>(w, p);
  A::settle(w);
}

}  // namespace

int64_t low_latency_scratch_limit(const DeviceLimits& limits) {
  const auto room = static_cast<int64_t>(limits.shared_bytes) - kStaticShared - low_latency_shape(0, 0, limits).shared_bytes();
  return room / kLowLatencyWarps / 16 * 16;
}

void prepare_low_latency_kernels(const DeviceLimits& limits) {
  const int most = static_cast<int>(limits.shared_bytes - kStaticShared);
  allow_shared(low_latency_dispatch_kernel<CudaLanes>, most);
  allow_shared(low_latency_dispatch_kernel<CudaLanesTraced>, most);
  allow_shared(low_latency_combine_kernel<CudaLanes>, most);
  allow_shared(low_latency_combine_kernel<CudaLanesTraced>, most);
  check_cuda(prepare_flat_kernels<ScaledRows>(limits), "cudaFuncSetAttribute");
}

void warm_up_low_latency_kernels(const CallContext& call, const DeviceLimits& limits, LowLatencyState* state,
                                 cudaStream_t stream) {
  CudaLowLatencyDispatch d;
  d.d.call = call;
  d.state = state;
  launch_low_latency(d, {true, false}, 0, limits.multiprocessors, limits, stream);
  CudaLowLatencyCombine c;
  c.c.call = call;
  c.state = state;
  launch_low_latency(c, {true, false}, 0, limits.multiprocessors, limits, stream);
  CudaFlat f;
  f.f.d.call = call;
  f.state = state;
  launch_low_latency(f, 0, limits.multiprocessors, limits, stream);
}

// Every launch may begin while the kernel before it on the stream ends: it waits before it reads anything.
void launch_low_latency(const CudaLowLatencyDispatch& p, LaunchedHalves halves, int64_t scratch_bytes, int blocks,
                        const DeviceLimits& limits, cudaStream_t stream) {
  const CudaShape shape = low_latency_shape(scratch_bytes, p.d.tokens * p.d.layout.topk, limits);
  const bool traced = p.d.call.device_trace.records != nullptr;
  launch_kernel(traced ? low_latency_dispatch_kernel<CudaLanesTraced> : low_latency_dispatch_kernel<CudaLanes>, blocks, shape,
                limits.dependent_launches, stream, "low-latency dispatch kernel", p, shape, halves);
}
void launch_low_latency(const CudaLowLatencyCombine& p, LaunchedHalves halves, int64_t scratch_bytes, int blocks,
                        const DeviceLimits& limits, cudaStream_t stream) {
  const CudaShape shape = low_latency_shape(scratch_bytes, p.c.layout.max_tokens * p.c.layout.topk, limits);
  const bool traced = p.c.call.device_trace.records != nullptr;
  launch_kernel(traced ? low_latency_combine_kernel<CudaLanesTraced> : low_latency_combine_kernel<CudaLanes>, blocks, shape,
                limits.dependent_launches, stream, "low-latency combine kernel", p, shape, halves);
}
void launch_low_latency(const CudaFlat& p, int64_t scratch_bytes, int blocks, const DeviceLimits& limits, cudaStream_t stream) {
  check_cuda(launch_flat(p, ScaledRows{}, scratch_bytes, blocks, limits, stream), "all-to-all kernel");
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Low-latency mode as kernels: protocol/low_latency_*.hpp over blocks of one multiprocessor each.
//
// Progress: all warps of a rank send before they wait, and wait for remote sends only. All blocks of a launch that receives
// must be able to run at the same time, because a block that has not begun has not sent: the launcher keeps the grid to one
// block per multiprocessor. Other kernels may delay a block, as long as they end.
#include "arch/cuda/cuda_traced.cuh"
#include "exchange/cuda/kernel_frame.cuh"
#include "exchange/cuda/low_latency_launch.hpp"

namespace switchyard::detail {

namespace {

constexpr uint32_t kStageBytes = 2048;

/// T of this launch.
__device__ int64_t tokens_now(int64_t bound, const int32_t* device_tokens) {
  if (device_tokens == nullptr) return bound;
  const int64_t tokens = *device_tokens;
  return tokens < 0 ? 0 : tokens < bound ? tokens : bound;
}

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
  if (!begin_block(given.d.call, given.state, halves.receive, p.call)) return;
  if (threadIdx.x == 0) p.tokens = tokens_now(given.d.tokens, given.device_tokens);
  __syncthreads();
  CudaWarp w(dynamic_shared, shape);
  const KernelTrace<A> trace(w, p.call.device_trace);
  if (halves.send) low_latency_send<A>(w, p);
  if (halves.receive) (void)low_latency_receive<A>(w, p);
  Cuda::settle(w);
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
  if (!begin_block(given.c.call, given.state, halves.receive, p.call)) return;
  CudaWarp w(dynamic_shared, shape);
  const KernelTrace<A> trace(w, p.call.device_trace);
  if (halves.send) low_latency_return<A>(w, p);
  if (halves.receive) (void)low_latency_sum<A>(w, p);
  Cuda::settle(w);
}

template <class A>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    flat_kernel(const __grid_constant__ CudaFlat given, const __grid_constant__ CudaShape shape, const LaunchedHalves) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(FlatParams)];
  auto& p = *reinterpret_cast<FlatParams*>(params);
  launch_dependents();
  copy_to_shared(given.f, p);
  __syncthreads();
  wait_for_previous();
  if (!begin_block(given.f.d.call, given.state, true, p.d.call)) return;
  if (threadIdx.x == 0) {
    p.c.call.epoch = p.d.call.epoch;
    p.d.tokens = tokens_now(given.f.d.tokens, given.device_tokens);
  }
  __syncthreads();
  CudaWarp w(dynamic_shared, shape);
  const KernelTrace<A> trace(w, p.d.call.device_trace);
  (void)flat_exchange<A>(w, p);
  Cuda::settle(w);
}

CudaShape shape_of(int64_t scratch_bytes) {
  return {kLowLatencyWarps, 1, kStageBytes, static_cast<uint32_t>(round_up(scratch_bytes, 16))};
}

}  // namespace

int64_t low_latency_scratch_limit(const DeviceLimits& limits) {
  const auto room = static_cast<int64_t>(limits.shared_bytes) - 3072 - shape_of(0).shared_bytes();  // 3072: parameters
  return room / kLowLatencyWarps / 16 * 16;
}

void prepare_low_latency_kernels(const DeviceLimits& limits) {
  static_assert(sizeof(FlatParams) <= 3072 && sizeof(CudaFlat) <= 4096);
  const int most = static_cast<int>(shape_of(low_latency_scratch_limit(limits)).shared_bytes());
  allow_shared(low_latency_dispatch_kernel<Cuda>, most);
  allow_shared(low_latency_dispatch_kernel<CudaTraced>, most);
  allow_shared(low_latency_combine_kernel<Cuda>, most);
  allow_shared(low_latency_combine_kernel<CudaTraced>, most);
  allow_shared(flat_kernel<Cuda>, most);
  allow_shared(flat_kernel<CudaTraced>, most);
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
  launch_low_latency(f, {true, true}, 0, limits.multiprocessors, limits, stream);
}

// Every launch may begin while the kernel before it on the stream ends: it waits before it reads anything.
void launch_low_latency(const CudaLowLatencyDispatch& p, LaunchedHalves halves, int64_t scratch_bytes, int blocks,
                        const DeviceLimits& limits, cudaStream_t stream) {
  const CudaShape shape = shape_of(scratch_bytes);
  const bool traced = p.d.call.device_trace.records != nullptr;
  launch_kernel(traced ? low_latency_dispatch_kernel<CudaTraced> : low_latency_dispatch_kernel<Cuda>, blocks, shape,
                limits.dependent_launches, stream, "low-latency dispatch kernel", p, shape, halves);
}
void launch_low_latency(const CudaLowLatencyCombine& p, LaunchedHalves halves, int64_t scratch_bytes, int blocks,
                        const DeviceLimits& limits, cudaStream_t stream) {
  const CudaShape shape = shape_of(scratch_bytes);
  const bool traced = p.c.call.device_trace.records != nullptr;
  launch_kernel(traced ? low_latency_combine_kernel<CudaTraced> : low_latency_combine_kernel<Cuda>, blocks, shape,
                limits.dependent_launches, stream, "low-latency combine kernel", p, shape, halves);
}
void launch_low_latency(const CudaFlat& p, LaunchedHalves halves, int64_t scratch_bytes, int blocks, const DeviceLimits& limits,
                        cudaStream_t stream) {
  const CudaShape shape = shape_of(scratch_bytes);
  const bool traced = p.f.d.call.device_trace.records != nullptr;
  launch_kernel(traced ? flat_kernel<CudaTraced> : flat_kernel<Cuda>, blocks, shape, limits.dependent_launches, stream,
                "all-to-all kernel", p, shape, halves);
}

}  // namespace switchyard::detail

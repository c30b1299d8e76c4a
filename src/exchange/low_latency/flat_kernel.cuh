// SPDX-License-Identifier: Apache-2.0
// The whole-exchange kernel for any row function: protocol/low_latency/flat_exchange.hpp with one block per multiprocessor.
// Progress: as in dispatch.cu.
#pragma once

#include "exchange/low_latency/frame.cuh"

namespace switchyard::detail {

namespace low_latency {

template <class A, class P, class Make>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    flat_kernel(const __grid_constant__ CudaFlat args, const __grid_constant__ CudaShape shape,
                const __grid_constant__ Make make) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(P)];
  P& p = *reinterpret_cast<P*>(params);
  ptx::launch_dependents();
  ptx::wait_for_previous();
  const CallWords words = load_call_words(args.f.d.call, args.state);
  const EarlyIds ids = load_ids(args.f.d.ids, static_cast<int>(threadIdx.x), args.f.d.tokens * args.f.d.layout.topk);
  CudaWarp w(dynamic_shared, shape);
  const int tokens = tokens_now(args.f.d.tokens, args.device_tokens);
  const uint32_t version = version_now(args.map_version);
  prefetch_first_part(w, args.f.d, tokens);
  share_params(args.f.d, p.d);
  share_params(args.f.c, p.c);
  __syncthreads();
  fence_entry(w);
  stage_sending(args.f.d, ids, tokens, dynamic_shared, shape, p.d);
  if (threadIdx.x == 0) p.d.map_version = version;
  if (!begin_block(args.f.d.call, words, args.state, true, p.d.call)) return;
  if (threadIdx.x == 0) p.c.call.epoch = p.d.call.epoch;
  __syncthreads();
  const KernelTrace<A> trace(w, p.d.call.device_trace, Event::all_to_all, pack_launch(p.d.call.epoch, args.state, tokens));
  (void)flat_exchange<A>(w, p, make);
  A::settle(w);
}

}  // namespace low_latency

static_assert(sizeof(FlatParams) + kTraceShared <= kStaticShared && sizeof(CudaFlat) <= 4096);

/// Loads the kernels and allows them to use all shared memory. Call once per device and function, before any rank waits for
/// another.
template <class Make>
gpu::Status prepare_flat_kernels(const DeviceLimits& limits) {
  const int max = max_low_latency_shared(limits);
  const gpu::Status status = gpu::allow_shared(low_latency::flat_kernel<CudaLanes, FlatParams, Make>, max);
  return status != gpu::kOk ? status : gpu::allow_shared(low_latency::flat_kernel<CudaLanesTraced, FlatParams, Make>, max);
}

template <class Make>
gpu::Status launch_flat(const CudaFlat& p, const Make& make, int blocks, const DeviceLimits& limits, gpu::Stream stream) {
  const CudaShape shape = low_latency_shape(p.warps, p.f.d.tokens, p.f.d.layout.topk, 0, limits);
  const bool traced = p.f.d.call.device_trace.records != nullptr;
  return gpu::launch(traced ? low_latency::flat_kernel<CudaLanesTraced, FlatParams, Make>
                            : low_latency::flat_kernel<CudaLanes, FlatParams, Make>,
                     grid_of(blocks, shape, limits.dependent_launches), stream, p, shape, make);
}

}  // namespace switchyard::detail

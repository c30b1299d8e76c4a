// SPDX-License-Identifier: Apache-2.0
// The whole exchange as a kernel, for any function of a row: protocol/flat_exchange.hpp over blocks of one multiprocessor each.
// Progress: as in low_latency.cu.
#pragma once

#include "exchange/cuda/low_latency_frame.cuh"

namespace switchyard::detail {

template <class A, class Make>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    flat_kernel(const __grid_constant__ CudaFlat given, const __grid_constant__ CudaShape shape,
                const __grid_constant__ Make make) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(FlatParams)];
  auto& p = *reinterpret_cast<FlatParams*>(params);
  launch_dependents();
  copy_to_shared(given.f, p);
  __syncthreads();
  wait_for_previous();
  CudaWarp w(dynamic_shared, shape);
  const int64_t tokens = tokens_now(given.f.d.tokens, given.device_tokens);
  prefetch_first_piece(w, given.f.d, tokens);
  stage_ids(given.f.d.ids, tokens, given.f.d.layout.topk, true, dynamic_shared, shape, p.d.ids);
  if (threadIdx.x == 0) p.d.tokens = tokens;
  if (!begin_block(given.f.d.call, given.state, true, p.d.call)) return;
  if (threadIdx.x == 0) p.c.call.epoch = p.d.call.epoch;
  __syncthreads();
  const KernelTrace<A> trace(w, p.d.call.device_trace);
  (void)flat_exchange<A>(w, p, make);
  A::settle(w);
}

static_assert(sizeof(FlatParams) <= kStaticShared && sizeof(CudaFlat) <= 4096);

/// Once per device and function, before any rank waits for another: loads the kernels and lets them have all shared memory.
template <class Make>
cudaError_t prepare_flat_kernels(const DeviceLimits& limits) {
  const int most = static_cast<int>(limits.shared_bytes - kStaticShared);
  const cudaError_t status = allow_shared_status(flat_kernel<CudaLanes, Make>, most);
  return status != cudaSuccess ? status : allow_shared_status(flat_kernel<CudaLanesTraced, Make>, most);
}

/// Enqueues; `scratch_bytes`: of a warp.
template <class Make>
cudaError_t launch_flat(const CudaFlat& p, const Make& make, int64_t scratch_bytes, int blocks, const DeviceLimits& limits,
                        cudaStream_t stream) {
  const CudaShape shape = low_latency_shape(scratch_bytes, p.f.d.tokens * p.f.d.layout.topk, limits);
  const bool traced = p.f.d.call.device_trace.records != nullptr;
  return launch_status(traced ? flat_kernel<CudaLanesTraced, Make> : flat_kernel<CudaLanes, Make>, blocks, shape,
                       limits.dependent_launches, stream, p, shape, make);
}

}  // namespace switchyard::detail

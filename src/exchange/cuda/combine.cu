// SPDX-License-Identifier: Apache-2.0
// Combine as a kernel: protocol/combine_pull.hpp over blocks of one multiprocessor each.
//
// Progress: a warp waits for `outputs` of all ranks, its own included, which the last warp of a rank to arrive publishes, and
// for `pulled` likewise. So all blocks must be able to run at the same time: the launcher keeps the grid to one block per
// multiprocessor. Other kernels may delay a block, as long as they end.
#include "arch/cuda/cuda_traced.cuh"
#include "exchange/cuda/kernel_frame.cuh"
#include "exchange/cuda/launch.hpp"

namespace switchyard::detail {

namespace {

template <class A>
__global__ void __launch_bounds__(kSumWarps* kLanes, 1)
    combine_kernel(const __grid_constant__ CudaCombineParams given, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CudaCombineParams)];
  auto& p = *reinterpret_cast<CudaCombineParams*>(params);
  copy_to_shared(given, p);
  if (!begin_block(given.c.call, given.state, p.c.call)) return;
  CudaWarp w(dynamic_shared, shape);
  const KernelTrace<A> trace(w, p.c.call.device_trace);
  const TablesHeader& header = *given.header;
  if (threadIdx.x == 0) {
    p.c.tokens = header.tokens;
    p.c.rows = header.rows;
    p.c.num_records = header.num_records;
    if (!header.any_weights) p.c.record_weight = nullptr;
    if (!header.any_weights && p.c.weights == p.handle_weights) p.c.weights = nullptr;
  }
  __syncthreads();
  if (!combine_pull<A>(w, p.c)) return Cuda::settle(w);
  (void)placements_agree(w, p.c.call, p.c.control, p.c.place.signature, p.soft);
  Cuda::settle(w);
  if (w.index() == 0) end_call(given.state, p.c.call.epoch);
}

/// The one that records, if this call is traced.
auto kernel_for(const CudaCombineParams& p) {
  return p.c.call.device_trace.records != nullptr ? combine_kernel<CudaTraced> : combine_kernel<Cuda>;
}

constexpr CudaShape kShape{kSumWarps, 0, 0, 0};  // rows are summed out of registers: docs/design/0010-normal-mode-on-gpus.md

}  // namespace

void prepare_combine_kernel() {
  allow_shared(combine_kernel<Cuda>, static_cast<int>(kShape.shared_bytes()));
  allow_shared(combine_kernel<CudaTraced>, static_cast<int>(kShape.shared_bytes()));
}

void warm_up_combine_kernel(const CallContext& call, const DeviceLimits& limits, ObjectState* state, cudaStream_t stream) {
  CudaCombineParams p;
  p.c.call = call;
  p.state = state;
  kernel_for(p)<<<limits.multiprocessors, kSumWarps * kLanes, kShape.shared_bytes(), stream>>>(p, kShape);
  check_cuda(cudaGetLastError(), "combine kernel");
}

void launch_combine(const CudaCombineParams& p, int blocks, cudaStream_t stream) {
  kernel_for(p)<<<blocks, kSumWarps * kLanes, kShape.shared_bytes(), stream>>>(p, kShape);
  check_cuda(cudaGetLastError(), "combine kernel");
}

}  // namespace switchyard::detail

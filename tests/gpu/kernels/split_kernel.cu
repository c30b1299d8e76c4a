// SPDX-License-Identifier: Apache-2.0
#include "gpu/kernels/split_kernel.hpp"

#include <stdexcept>
#include <string>

#include "arch/cuda/cuda_arch.cuh"
#include "protocol/low_latency/messages.hpp"

namespace harness {
namespace {

using namespace switchyard::detail;

__global__ void split_kernel(const __grid_constant__ CallContext call, const __grid_constant__ LowLatencyLayout layout,
                             int pieces, int units, uint32_t* seen, uint32_t* share) {
  CudaWarp w{CudaWarp::Bare{}};
  uint32_t mine = 0;
  (void)for_each_message<CudaLanes>(w, call, layout, [&](int source, int unit, int piece) {
    if (threadIdx.x % kLanes == 0) atomicAdd(&seen[(int64_t{source} * units + unit) * pieces + piece], 1u);
    ++mine;
    return true;
  });
  if (threadIdx.x % kLanes == 0) share[w.index()] = mine;
}

}  // namespace

void launch_split(const CallContext& call, const LowLatencyLayout& layout, int pieces, int units, uint32_t* seen,
                  uint32_t* share, int blocks, int warps, cudaStream_t stream) {
  split_kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(warps * kLanes), 0, stream>>>(call, layout, pieces, units,
                                                                                                    seen, share);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("split kernel: ") + cudaGetErrorString(error));
}

}  // namespace harness

// SPDX-License-Identifier: Apache-2.0
#include "measure/gpu/quantize_rate.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "arch/cuda/cuda_quantize.cuh"

namespace switchyard::measure {
namespace {

constexpr int kWarps = 14;  // per block: number of rows of hidden 7168 that fit into shared memory together with their sources

__global__ void __launch_bounds__(kWarps * 32, 1)
    quantize_kernel(const std::byte* rows, int64_t num_rows, int hidden, uint32_t scale_bytes, uint32_t* sink) {
  extern __shared__ __align__(128) std::byte shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  std::byte* const q = shared + static_cast<uint32_t>(warp) * (static_cast<uint32_t>(hidden) + scale_bytes);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  const auto low_bits = static_cast<unsigned>(reinterpret_cast<uintptr_t>(q));
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + warp; i < num_rows; i += step)
    detail::quantize_row_lanes<1, 2>(lane, detail::LaneTargets{reinterpret_cast<uint8_t*>(q), q + hidden, 1u, low_bits},
                                     rows + i * hidden * 2, DType::bf16, hidden, ScaleKind::f32, kScaleGroup);
  __syncwarp();
  if (num_rows < 0) sink[0] = *reinterpret_cast<const uint32_t*>(q);  // never true; prevents removal of the loop
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace

void enqueue_quantize(void* stream, const void* rows, int64_t num_rows, int64_t hidden, int sms, void* sink) {
  const auto scale_bytes = static_cast<uint32_t>((scale_row_bytes(hidden, ScaleKind::f32) + 127) / 128 * 128);
  const size_t shared = static_cast<size_t>(kWarps) * (static_cast<size_t>(hidden) + scale_bytes);
  check(cudaFuncSetAttribute(quantize_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "quantise kernel");
  quantize_kernel<<<sms, kWarps * 32, shared, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const std::byte*>(rows), num_rows, static_cast<int>(hidden), scale_bytes, static_cast<uint32_t*>(sink));
  check(cudaGetLastError(), "quantise kernel");
}

}  // namespace switchyard::measure

// SPDX-License-Identifier: Apache-2.0
#include "gpu/backward/backward_rows.hpp"

#include <cuda_bf16.h>

#include <stdexcept>
#include <string>

namespace harness {
namespace {

constexpr unsigned kBlocks = 32, kThreads = 256;

__global__ void weigh_kernel(__nv_bfloat16* rows, int64_t count, int64_t columns, const float* weights, const int64_t* source) {
  for (int64_t r = blockIdx.x; r < count; r += gridDim.x) {
    if (source[r] < 0) continue;
    const float weight = weights[r];
    __nv_bfloat16* const row = rows + r * columns;
    for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) row[c] = __float2bfloat16_rn(weight * __bfloat162float(row[c]));
  }
}

__global__ void place_kernel(float* to, int64_t count, int columns, const float* values, const int64_t* source) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t r = first; r < count; r += int64_t{gridDim.x} * blockDim.x) {
    const int64_t k = source[r] < 0 ? -1 : source[r] >> 32 & 0xffff;
    for (int c = 0; c < columns; ++c) to[r * columns + c] = c == k ? values[r] : 0.f;
  }
}

void launched(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

void weigh_rows(void* rows, int64_t count, int64_t columns, const float* weights, const int64_t* source, cudaStream_t stream) {
  weigh_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(rows), count, columns, weights, source);
  launched("weights of rows");
}

void place_in_columns(float* to, int64_t count, int columns, const float* values, const int64_t* source, cudaStream_t stream) {
  place_kernel<<<kBlocks, kThreads, 0, stream>>>(to, count, columns, values, source);
  launched("values in columns");
}

}  // namespace harness

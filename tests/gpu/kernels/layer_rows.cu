// SPDX-License-Identifier: Apache-2.0
#include "gpu/kernels/layer_rows.hpp"

#include <cuda_bf16.h>

#include <stdexcept>
#include <string>

namespace harness {
namespace {

constexpr unsigned kBlocks = 528, kThreads = 256;

__device__ uint32_t mixed(uint64_t key) {
  key ^= key >> 33;
  key *= 0xff51afd7ed558ccdULL;
  key ^= key >> 33;
  key *= 0xc4ceb9fe1a85ec53ULL;
  return static_cast<uint32_t>(key >> 32);
}

__device__ int64_t first_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t step() { return int64_t{gridDim.x} * blockDim.x; }

__global__ void rows_kernel(uint16_t* to, int64_t count, uint32_t seed, float scale) {
  for (int64_t i = first_index(); i < count; i += step()) {
    const auto level = static_cast<int>(mixed(static_cast<uint64_t>(i) * 2 + 1 + (uint64_t{seed} << 40)) >> 24) - 128;
    to[i] = __bfloat16_as_ushort(__float2bfloat16_rn(static_cast<float>(level) * (scale / 128)));
  }
}

__global__ void ids_kernel(int32_t* to, int64_t tokens, int topk, int experts) {
  const int apart = experts / topk;
  for (int64_t f = first_index(); f < tokens * topk; f += step()) {
    const int64_t t = f / topk;
    const auto first = static_cast<int>(mixed(static_cast<uint64_t>(t)) & static_cast<uint32_t>(experts - 1));
    to[f] = (first + static_cast<int>(f % topk) * apart) & (experts - 1);
  }
}

__global__ void weights_kernel(float* to, int64_t count, uint32_t seed) {
  for (int64_t i = first_index(); i < count; i += step())
    to[i] = 0.25f + static_cast<float>(mixed(static_cast<uint64_t>(i) + (uint64_t{seed} << 40)) >> 24) / 256;
}

__global__ void compare_kernel(const uint32_t* a, const uint32_t* b, int64_t words, unsigned long long* differ,
                               unsigned long long* first) {
  for (int64_t i = first_index(); i < words; i += step()) {
    if (a[i] == b[i]) continue;
    atomicAdd(differ, 1ull);
    atomicMin(first, static_cast<unsigned long long>(i));
  }
}

void launched(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

void launch_layer_rows(uint16_t* to, int64_t count, uint32_t seed, float scale, cudaStream_t stream) {
  rows_kernel<<<kBlocks, kThreads, 0, stream>>>(to, count, seed, scale);
  launched("rows of a layer");
}

void launch_layer_ids(int32_t* to, int64_t tokens, int topk, int experts, cudaStream_t stream) {
  ids_kernel<<<kBlocks, kThreads, 0, stream>>>(to, tokens, topk, experts);
  launched("ids of a layer");
}

void launch_layer_weights(float* to, int64_t count, uint32_t seed, cudaStream_t stream) {
  weights_kernel<<<kBlocks, kThreads, 0, stream>>>(to, count, seed);
  launched("weights of a layer");
}

void launch_compare(const uint32_t* a, const uint32_t* b, int64_t words, unsigned long long* differ, unsigned long long* first,
                    cudaStream_t stream) {
  compare_kernel<<<kBlocks, kThreads, 0, stream>>>(a, b, words, differ, first);
  launched("comparison");
}

}  // namespace harness

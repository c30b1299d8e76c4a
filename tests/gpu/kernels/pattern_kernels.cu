// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <string>

#include "gpu/kernels/pattern.hpp"

namespace switchyard::test {
namespace {

__global__ void fill_kernel(uint32_t* to, size_t words, uint32_t seed) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) to[i] = word_of(seed, i);
}

__global__ void copy_kernel(uint32_t* to, const uint32_t* from, size_t words) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) to[i] = from[i];
}

void finish(const char* what) {
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

void fill_by_kernel(uint32_t* to, size_t words, uint32_t seed) {
  if (words == 0) return;
  fill_kernel<<<64, 256>>>(to, words, seed);
  finish("fill_by_kernel");
}

void copy_by_kernel(uint32_t* to, const uint32_t* from, size_t words) {
  if (words == 0) return;
  copy_kernel<<<64, 256>>>(to, from, words);
  finish("copy_by_kernel");
}

}  // namespace switchyard::test

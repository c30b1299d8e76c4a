// SPDX-License-Identifier: Apache-2.0
#define _POSIX_C_SOURCE 200809L  // setenv
#include "gpu/harness/c_gpu.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#include "abi/c_check.h"

int gpu_is_visible(int* status) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0) return 1;
  const char* optional = getenv("SWITCHYARD_GPU_OPTIONAL");
  const int skipped = optional && *optional == '1';
  printf("%s: no GPU is visible\n", skipped ? "SKIPPED" : "FAILED");
  *status = !skipped;
  return 0;
}

void* on_gpu(const void* host, size_t bytes) {
  void* device = NULL;
  CHECK(cudaMalloc(&device, bytes) == cudaSuccess);
  CHECK(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
  return device;
}

void* filled_on_gpu(int byte, size_t bytes) {
  void* device = NULL;
  CHECK(cudaMalloc(&device, bytes) == cudaSuccess);
  CHECK(cudaMemset(device, byte, bytes) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  return device;
}

void read_back(void* host, const void* device, size_t bytes) {
  CHECK(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
}

void free_all(void* const* memory, size_t number_of) {
  for (size_t i = 0; i < number_of; ++i) CHECK(cudaFree(memory[i]) == cudaSuccess);
}

// SPDX-License-Identifier: Apache-2.0
// An error of each kind that compute-sanitizer detects, planted in one of two ranks that are processes. scripts/gpu_sanitize.sh
// accepts a clean result from a tool only if the tool also finds this error. The exit status is 0 regardless of the kernel's
// result, or 2 if the program could not run.
#include <cuda_runtime.h>

#include <cstdio>
#include <iostream>
#include <map>
#include <string>

#include "multiproc/fork_ranks.hpp"

namespace {

using switchyard::test::ChildRank;
using switchyard::test::ForkedRanks;

constexpr int kThreads = 64;

/// Stores one word beyond the end of `words`.
__global__ void store_outside(int* words) { words[threadIdx.x + 1] = static_cast<int>(threadIdx.x); }

/// A warp reads shared memory written by the other warp, without a barrier.
__global__ void read_too_early(int* words) {
  __shared__ int shared[kThreads];
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  words[threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
}

/// A block barrier skipped by half of a warp.
__global__ void meet_by_half(int* words) {
  if (threadIdx.x % 32 < 16) __syncthreads();
  words[threadIdx.x] = static_cast<int>(threadIdx.x);
}

using Kernel = void (*)(int*);

void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

void plant(const ChildRank& me, Kernel kernel) {
  int devices = 0;
  require(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  require(cudaSetDevice(me.rank() % devices), "cudaSetDevice");
  int* words = nullptr;
  require(cudaMalloc(reinterpret_cast<void**>(&words), kThreads * sizeof(int)), "cudaMalloc");
  if (me.rank() == 1) kernel<<<1, kThreads>>>(words);
  require(cudaGetLastError(), "launch");
  (void)cudaDeviceSynchronize();  // a tool may end the kernel
  (void)cudaFree(words);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, Kernel> kinds{
      {"memcheck", store_outside}, {"racecheck", read_too_early}, {"synccheck", meet_by_half}};
  const auto kind = argc == 2 ? kinds.find(argv[1]) : kinds.end();
  if (kind == kinds.end()) {
    std::fprintf(stderr, "usage: gpu_planted_errors memcheck|racecheck|synccheck\n");
    return 2;
  }
  ForkedRanks ranks(2, [&](ChildRank& me) { plant(me, kind->second); });
  int status = 0;
  for (const auto& end : ranks.finish(std::chrono::seconds(120))) {
    if (end.exit_code == 1 || end.overdue) status = 2;  // a tool that finds an error changes the exit code
    if (!end.ok()) std::cerr << end << '\n';
  }
  return status;
}

// SPDX-License-Identifier: Apache-2.0
#include "measure/gpu/timer_tick.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "arch/cuda/ptx.cuh"

namespace switchyard::measure {
namespace {

namespace ptx = detail::ptx;

constexpr int kSteps = 64;
constexpr int64_t kCycles = 20'000'000;  // about ten milliseconds: the coarsest timers tick once each

__global__ void tick_kernel(uint64_t* smallest) {
  uint64_t best = 0, last = ptx::global_timer();
  const int64_t begin = clock64();
  for (int steps = 0; steps < kSteps && clock64() - begin < kCycles;) {
    const uint64_t now = ptx::global_timer();
    if (now == last) continue;
    if (steps++ > 0 && (best == 0 || now - last < best)) best = now - last;  // the first step began before this thread started
    last = now;
  }
  *smallest = best;
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace

uint64_t global_timer_tick() {
  uint64_t *device = nullptr, tick = 0;
  check(cudaMalloc(reinterpret_cast<void**>(&device), sizeof tick), "cudaMalloc");
  tick_kernel<<<1, 1>>>(device);
  const cudaError_t status = cudaMemcpy(&tick, device, sizeof tick, cudaMemcpyDeviceToHost);
  (void)cudaFree(device);
  check(status, "timer kernel");
  return tick;
}

}  // namespace switchyard::measure

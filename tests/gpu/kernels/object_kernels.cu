// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <string>

#include "gpu/kernels/object_kernels.hpp"

namespace harness {
namespace {

__device__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void copies_kernel(const CopyList list) {
  const int i = static_cast<int>(blockIdx.y);
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t w = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; w < list.words[i]; w += step)
    list.to[i][w] = list.from[i][w];
}

__global__ void gate_kernel(const volatile uint32_t* opened, uint32_t* timed_out, uint64_t limit_ns) {
  const uint64_t start = now_ns();
  while (*opened == 0) {
    if (now_ns() - start > limit_ns) {
      *timed_out = 1;
      return;
    }
    __nanosleep(1000);
  }
}

__global__ void busy_kernel(uint64_t ns, float* sink) {
  const uint64_t start = now_ns();
  float a = static_cast<float>(threadIdx.x), b = 1.0001f, c = 0.5f;
  do {
    for (int i = 0; i < 256; ++i) {
      a = a * b + c;
      c = c * b + a;
    }
  } while (now_ns() - start < ns);
  if (a == -1.0f && c == -2.0f) *sink = a;  // prevents the compiler from removing the loop
}

__global__ void set_kernel(int32_t* to, int32_t value) { *to = value; }

void launched(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

void CopyList::add(void* destination, const void* source, size_t bytes) {
  if (bytes == 0) return;
  if (n == kMax) throw std::runtime_error("CopyList is full");
  to[n] = static_cast<uint32_t*>(destination);
  from[n] = static_cast<const uint32_t*>(source);
  words[n++] = (bytes + 3) / 4;
}

void launch_copies(const CopyList& list, cudaStream_t stream) {
  if (list.n == 0) return;
  copies_kernel<<<dim3(4, static_cast<unsigned>(list.n)), 256, 0, stream>>>(list);
  launched("copies");
}

void launch_copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  CopyList list;
  list.add(to, from, bytes);
  launch_copies(list, stream);
}

void launch_gate(const uint32_t* opened, uint32_t* timed_out, uint64_t limit_ns, cudaStream_t stream) {
  gate_kernel<<<1, 1, 0, stream>>>(opened, timed_out, limit_ns);
  launched("gate");
}

void launch_busy(int blocks, int threads, uint64_t ns, float* sink, cudaStream_t stream) {
  busy_kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream>>>(ns, sink);
  launched("busy");
}

void launch_set(int32_t* to, int32_t value, cudaStream_t stream) {
  set_kernel<<<1, 1, 0, stream>>>(to, value);
  launched("set");
}

}  // namespace harness

// SPDX-License-Identifier: Apache-2.0
#include "gpu/kernels/full_gpu.hpp"

#include <stdexcept>
#include <thread>

namespace harness {
namespace {

constexpr int kThreads = 1024;

/// A block leaves only after all blocks have arrived.
__global__ void full_kernel(uint32_t* begun, uint32_t wanted, uint32_t* gave_up) {
  extern __shared__ uint32_t all_of_it[];
  if (threadIdx.x != 0) return;
  all_of_it[0] = wanted;
  constexpr uint64_t kLimit = 2'000'000'000;
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  atomicAdd(begun, 1u);
  while (static_cast<int32_t>(*static_cast<volatile uint32_t*>(begun) - all_of_it[0]) < 0) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - start < kLimit) continue;
    atomicAdd(gave_up, 1u);
    return;
  }
}

__global__ void held_kernel(HeldMultiprocessors::Words words, uint64_t limit_ns) {
  if (threadIdx.x != 0) return;
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  atomicAdd_system(words.begun, 1u);
  while (*static_cast<volatile uint32_t*>(words.opened) == 0) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - start < limit_ns) {
      __nanosleep(1000);
      continue;
    }
    atomicAdd_system(words.gave_up, 1u);
    return;
  }
}

}  // namespace

bool idle_within(cudaStream_t stream, std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (true) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status == cudaSuccess) return true;
    (void)cudaGetLastError();
    if (status != cudaErrorNotReady) must(status, "cudaStreamQuery");
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

HeldMultiprocessors::HeldMultiprocessors(Station& me, int multiprocessors) : me_(me), blocks_(multiprocessors) {
  must(cudaDeviceGetAttribute(&shared_bytes_, cudaDevAttrMaxSharedMemoryPerBlockOptin, me.device()), "device attribute");
  must(cudaFuncSetAttribute(held_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes_), "shared memory");
  uint32_t* words = nullptr;  // freed only when the process ends, because freeing it waits for all kernels
  must(cudaHostAlloc(reinterpret_cast<void**>(&words), 768, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  words_ = {words, words + 64, words + 128};
  *words_.opened = 1;
  launch(std::chrono::milliseconds(0));
  must(cudaStreamSynchronize(me_.stream(1)), "first launch");
}

void HeldMultiprocessors::launch(std::chrono::milliseconds limit) {
  *words_.begun = *words_.gave_up = 0;
  const auto ns = static_cast<uint64_t>(std::chrono::nanoseconds(limit).count());
  held_kernel<<<static_cast<unsigned>(blocks_), 32, static_cast<size_t>(shared_bytes_), me_.stream(1)>>>(words_, ns);
  must(cudaGetLastError(), "held kernel");
}

void HeldMultiprocessors::hold(std::chrono::milliseconds limit) {
  *words_.opened = 0;
  launch(limit);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (*static_cast<volatile uint32_t*>(words_.begun) < static_cast<uint32_t>(blocks_)) {
    if (std::chrono::steady_clock::now() > end) {
      release();
      throw std::runtime_error("the kernel that holds multiprocessors did not get them");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

FullGpu::FullGpu(Station& me) : me_(me), words_(reinterpret_cast<uint32_t*>(me.allocate(8))) {
  must(cudaDeviceGetAttribute(&blocks_, cudaDevAttrMultiProcessorCount, me.device()), "device attribute");
  must(cudaDeviceGetAttribute(&shared_bytes_, cudaDevAttrMaxSharedMemoryPerBlockOptin, me.device()), "device attribute");
  must(cudaFuncSetAttribute(full_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes_), "shared memory");
  launch_set(reinterpret_cast<int32_t*>(words_), 0, me.stream());
  launch_set(reinterpret_cast<int32_t*>(words_) + 1, 0, me.stream());
  must(cudaStreamSynchronize(me.stream()), "words");
}

void FullGpu::expect_free(const std::string& what) {
  const auto blocks = static_cast<unsigned>(blocks_);
  const cudaStream_t stream = me_.stream(1);
  full_kernel<<<blocks, kThreads, static_cast<size_t>(shared_bytes_), stream>>>(words_, ++launches_ * blocks, words_ + 1);
  must(cudaGetLastError(), "full kernel");
  if (!idle_within(stream, 5s)) return me_.f.add(what + ": a kernel that needs the whole GPU did not end");
  uint32_t gave_up = 0;
  me_.read(&gave_up, words_ + 1, 4);
  me_.f.equal(0u, gave_up, what + ": blocks that did not find the whole GPU free");
}

}  // namespace harness

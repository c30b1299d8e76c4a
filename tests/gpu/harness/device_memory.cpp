// SPDX-License-Identifier: Apache-2.0
#include "harness/rank_memory.hpp"

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace harness {

namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

/// Allocates once, so nothing is allocated while a kernel may wait for a peer.
class CudaMemory final : public RankMemory {
 public:
  explicit CudaMemory(int device) : device_(device) {
    check(cudaSetDevice(device), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaMalloc(reinterpret_cast<void**>(&arena_), kArenaBytes), "cudaMalloc");
    check(cudaMalloc(reinterpret_cast<void**>(&kept_), kKeptBytes), "cudaMalloc");
    fill(arena_, 0xEE, kArenaBytes);  // a stream's first use may wait for other ranks' kernels
    check(cudaStreamSynchronize(stream_), "cudaMemset");
  }
  ~CudaMemory() override {
    cudaSetDevice(device_);
    cudaStreamSynchronize(stream_);
    cudaFree(arena_);
    cudaFree(kept_);
    cudaStreamDestroy(stream_);
  }
  void begin() { check(cudaSetDevice(device_), "cudaSetDevice"); }
  bool on_device() const override { return true; }
  void* stream() const override { return stream_; }
  void* give(const void* host, size_t bytes) override {
    if (!host || bytes == 0) return nullptr;
    if (used_ + bytes > kArenaBytes) throw std::runtime_error("the test's device memory is too small");
    std::byte* at = arena_ + used_;
    used_ += (bytes + 255) / 256 * 256;
    write(at, host, bytes);
    return at;
  }
  void* lend(void* host, size_t bytes) override { return give(host, bytes); }
  void* keep(size_t bytes) override {
    if (bytes > kKeptBytes) throw std::runtime_error("the test's kept device memory is too small");
    fill(kept_, 0xEE, bytes);
    return kept_;
  }
  void write(void* device, const void* host, size_t bytes) override {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "copy to the device");
    check(cudaStreamSynchronize(stream_), "copy to the device");
  }
  /// Waits for the stream first: a copy to ordinary memory queued behind a kernel that waits for a rank of this process may
  /// keep that rank from launching.
  void read(void* host, const void* device, size_t bytes) override {
    check(cudaStreamSynchronize(stream_), "copy from the device");
    if (bytes > 0) check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_), "copy from the device");
    check(cudaStreamSynchronize(stream_), "copy from the device");
  }
  void fill(void* device, int byte, size_t bytes) override {
    if (bytes > 0) check(cudaMemsetAsync(device, byte, bytes, stream_), "cudaMemset");
  }
  void release() override {
    if (used_ > 0) fill(arena_, 0xEE, used_);
    used_ = 0;
  }

 private:
  static constexpr size_t kArenaBytes = size_t{96} << 20, kKeptBytes = size_t{32} << 20;
  int device_;
  cudaStream_t stream_ = nullptr;
  std::byte *arena_ = nullptr, *kept_ = nullptr;
  size_t used_ = 0;
};

}  // namespace

int count_gpus() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

RankMemory& rank_memory(const switchyard::Group& group) {
  const int rank = group.rank(), device = group.options().device;
  // Kept until the process ends: new streams may share a queue with a kernel that waits for them.
  static std::mutex mutex;
  static auto* all = new std::map<int, std::unique_ptr<CudaMemory>>;
  const std::lock_guard lock(mutex);
  auto& mine = (*all)[rank];
  if (!mine) mine = std::make_unique<CudaMemory>(device >= 0 ? device : rank % count_gpus());
  mine->begin();
  return *mine;
}

}  // namespace harness

// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "device/rank_device.hpp"
#include "measure/gpu/descriptor_exchange.hpp"
#include "measure/gpu/timer_tick.hpp"
#include "switchyard/status.hpp"

namespace switchyard::tool {
namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Error(ErrorCode::system, std::string(what) + ": " + cudaGetErrorString(status));
}

class CudaDevice final : public RankDevice {
 public:
  explicit CudaDevice(int device) : device_(device) {
    begin();
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~CudaDevice() override = default;  // lives as long as its process
  void begin() const { check(cudaSetDevice(device_), "cudaSetDevice"); }
  void reserve(size_t bytes) {
    used_ = kept_ = 0;
    if (bytes <= size_) return;
    wait();
    check(cudaFree(arena_), "cudaFree");
    arena_ = nullptr;
    size_ = 0;
    check(cudaMalloc(reinterpret_cast<void**>(&arena_), bytes), "cudaMalloc of the rank's rows");
    size_ = bytes;
    fill(arena_, 0, std::min<size_t>(bytes, 256));  // a stream's first use may wait for other ranks' kernels
    wait();
  }

  void* stream() const override { return stream_; }
  void* allocate(size_t bytes) override {
    if (bytes == 0) return nullptr;
    if (bytes > size_ - used_)
      throw std::runtime_error("rank device: " + std::to_string(bytes) + " bytes asked for, " + std::to_string(size_ - used_) +
                               " of " + std::to_string(size_) + " are free");
    std::byte* at = arena_ + used_;
    used_ += std::min((bytes + 255) / 256 * 256, size_ - used_);
    return at;
  }
  void write(void* device, const void* host, size_t bytes) override {
    if (bytes > 0) check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "copy to the GPU");
    wait();
  }
  void read(void* host, const void* device, size_t bytes) const override {
    if (bytes > 0) check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_), "copy from the GPU");
    wait();
  }
  void fill(void* device, int byte, size_t bytes) override {
    if (bytes > 0) check(cudaMemsetAsync(device, byte, bytes, stream_), "cudaMemset");
  }
  void wait() const override { check(cudaStreamSynchronize(stream_), "wait for the GPU"); }
  void keep() override { kept_ = used_; }
  void release() override { used_ = kept_; }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  std::byte* arena_ = nullptr;
  size_t size_ = 0, used_ = 0, kept_ = 0;
};

}  // namespace

std::shared_ptr<RankDevice> gpu_device(int rank, int gpus, size_t arena_bytes) {
  static std::mutex mutex;
  static auto* all = new std::map<int, std::shared_ptr<CudaDevice>>;  // never destroyed: see the header
  const std::lock_guard lock(mutex);
  auto& mine = (*all)[rank];
  if (!mine) mine = std::make_shared<CudaDevice>(rank % gpus);
  mine->begin();
  mine->reserve(arena_bytes);
  return mine;
}

bool built_with_cuda() { return true; }
const char* no_cuda_text() { return ""; }
int cuda_runtime_version() { return CUDART_VERSION; }

std::vector<uint64_t> measure_timer_ticks(int gpus) {
  std::vector<uint64_t> ticks;
  for (int g = 0; g < gpus; ++g) {
    check(cudaSetDevice(g), "cudaSetDevice");
    ticks.push_back(measure::global_timer_tick());
  }
  return ticks;
}

std::vector<std::string> try_descriptor_exchange(int gpus, const std::vector<std::vector<bool>>& peer_access) {
  std::vector<std::string> problems;
  for (int g = 0; g < gpus; ++g) {
    const int next = (g + 1) % gpus;
    const bool access = peer_access.at(static_cast<size_t>(next)).at(static_cast<size_t>(g));
    try {
      measure::exchange_descriptor(g, access ? next : g);
      problems.emplace_back();
    } catch (const std::exception& e) {
      problems.emplace_back(e.what());
    }
  }
  return problems;
}

}  // namespace switchyard::tool

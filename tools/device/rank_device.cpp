// SPDX-License-Identifier: Apache-2.0
#include "device/rank_device.hpp"

#include <cstring>
#include <new>

namespace switchyard::tool {
namespace {

class HostDevice final : public RankDevice {
 public:
  bool on_host() const override { return true; }
  void* stream() const override { return nullptr; }
  void* allocate(size_t bytes) override {
    if (bytes == 0) return nullptr;
    memory_.emplace_back(new (std::align_val_t{64}) std::byte[bytes]);
    return memory_.back().get();
  }
  void write(void* device, const void* host, size_t bytes) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }
  void read(void* host, const void* device, size_t bytes) const override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }
  void fill(void* device, int byte, size_t bytes) override {
    if (bytes > 0) std::memset(device, byte, bytes);
  }
  void wait() const override {}
  void keep() override { kept_ = memory_.size(); }
  void release() override { memory_.resize(kept_); }

 private:
  struct Delete {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::vector<std::unique_ptr<std::byte[], Delete>> memory_;
  size_t kept_ = 0;
};

}  // namespace

Mirror::Mirror(RankDevice& device, void* memory, size_t bytes)
    : device_(device), memory_(memory), bytes_(bytes), copy_(device.on_host() ? 0 : bytes) {}

std::shared_ptr<RankDevice> rank_device(int rank, int gpus, size_t arena_bytes) {
  if (gpus > 0) return gpu_device(rank, gpus, arena_bytes);
  return std::make_shared<HostDevice>();
}

}  // namespace switchyard::tool

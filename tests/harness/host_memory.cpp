// SPDX-License-Identifier: Apache-2.0
// A rank's host memory. Each input is a separate block of its exact size, so AddressSanitizer detects accesses beyond either
// end.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "harness/rank_memory.hpp"

namespace harness {

namespace {

class HostMemory final : public RankMemory {
 public:
  bool on_device() const override { return false; }
  void* stream() const override { return nullptr; }
  void* give(const void* host, size_t bytes) override {
    if (!host || bytes == 0) return nullptr;
    given_.push_back({std::make_unique<std::byte[]>(bytes), bytes});
    std::memcpy(given_.back().data.get(), host, bytes);
    return given_.back().data.get();
  }
  void* lend(void* host, size_t) override { return host; }
  void* keep(size_t bytes) override {
    kept_.reset(static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 256) / 256 * 256)));
    std::memset(kept_.get(), 0xEE, bytes);
    return kept_.get();
  }
  void write(void* to, const void* host, size_t bytes) override { copy(to, host, bytes); }
  void read(void* host, const void* from, size_t bytes) override { copy(host, from, bytes); }
  void fill(void* at, int byte, size_t bytes) override {
    if (bytes > 0) std::memset(at, byte, bytes);
  }
  void release() override {
    for (const Block& block : given_) std::memset(block.data.get(), 0xEE, block.bytes);
    given_.clear();
  }

 private:
  struct Block {
    std::unique_ptr<std::byte[]> data;
    size_t bytes;
  };
  static void copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
  }

  std::vector<Block> given_;
  struct Free {
    void operator()(std::byte* at) const { std::free(at); }
  };
  std::unique_ptr<std::byte, Free> kept_;
};

}  // namespace

RankMemory& rank_memory(const switchyard::Group&) {
  thread_local HostMemory memory;
  return memory;
}

}  // namespace harness

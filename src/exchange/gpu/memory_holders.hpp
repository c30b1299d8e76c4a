// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "arch/gpu_order.hpp"

namespace switchyard::detail {

/// Memory of the GPU as long as this lives.
struct MemoryHolder {
  virtual ~MemoryHolder() = default;
  /// What is enqueued on `stream`, whose state is `capture`, until this ends uses the memory; a graph keeps it. The GPU is
  /// current.
  virtual void used_on(gpu::Stream stream, const CaptureState& capture) = 0;
};

/// Who holds which memory of a rank's GPU: a call that is given an address finds the owner of what lies there, of whichever
/// object. Any thread.
class MemoryHolders {
 public:
  void remember(const void* begin, size_t bytes, std::weak_ptr<MemoryHolder> holder) {
    const std::lock_guard lock(mutex_);
    std::erase_if(ranges_, [](const Range& r) { return r.holder.expired(); });
    ranges_.push_back({reinterpret_cast<uintptr_t>(begin), bytes, std::move(holder)});
  }
  /// The holder of the byte at `p`, or null. A holder that is found says that this is memory of the GPU.
  std::shared_ptr<MemoryHolder> find(const void* p) const {
    const auto at = reinterpret_cast<uintptr_t>(p);
    const std::lock_guard lock(mutex_);
    for (const Range& r : ranges_) {
      if (at < r.begin || at - r.begin >= r.bytes) continue;
      if (std::shared_ptr<MemoryHolder> holder = r.holder.lock()) return holder;
    }
    return nullptr;
  }

 private:
  struct Range {
    uintptr_t begin;
    size_t bytes;
    std::weak_ptr<MemoryHolder> holder;
  };
  mutable std::mutex mutex_;
  std::vector<Range> ranges_;
};

}  // namespace switchyard::detail

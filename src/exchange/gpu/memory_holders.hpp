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

/// GPU memory that exists as long as this object does.
struct MemoryHolder {
  virtual ~MemoryHolder() = default;
  /// Marks the memory as used by the work enqueued on `stream`, whose capture state is `capture`, until this object is
  /// destroyed. A graph keeps the memory alive. The GPU must be current.
  virtual void used_on(gpu::Stream stream, const CaptureState& capture) = 0;
};

/// Memory holders on a rank's GPU: maps an address passed to a call to the owner of that memory, regardless of which object
/// allocated it. Thread-safe.
class MemoryHolders {
 public:
  void remember(const void* begin, size_t bytes, std::weak_ptr<MemoryHolder> holder) {
    const std::lock_guard lock(mutex_);
    std::erase_if(ranges_, [](const Range& r) { return r.holder.expired(); });
    ranges_.push_back({reinterpret_cast<uintptr_t>(begin), bytes, std::move(holder)});
  }
  /// The holder of the byte at `p`, or null. Memory with a holder is always GPU memory.
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

// SPDX-License-Identifier: Apache-2.0
// Objects and buffers that calls take and return, so that calls allocate no memory in the steady state.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace switchyard::detail {

/// Page-aligned private memory.
struct PrivateBuffer {
  struct Delete {
    void operator()(std::byte* p) const noexcept { ::operator delete (p, std::align_val_t{4096}); }
  };
  std::unique_ptr<std::byte, Delete> data;
  size_t bytes = 0;

  static PrivateBuffer make(size_t bytes) {
    return {std::unique_ptr<std::byte, Delete>(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{4096}))), bytes};
  }
};

/// Keeps up to kKept buffers for reuse. Thread-safe.
class BufferRecycler {
 public:
  static constexpr size_t kKept = 8;

  /// Returns the smallest kept buffer of at least `bytes` and at most four times `bytes`, or a new one.
  PrivateBuffer take(size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      size_t best = kept_.size();
      for (size_t i = 0; i < kept_.size(); ++i)
        if (kept_[i].bytes >= bytes && kept_[i].bytes / 4 <= bytes &&
            (best == kept_.size() || kept_[i].bytes < kept_[best].bytes))
          best = i;
      if (best < kept_.size()) {
        std::swap(kept_[best], kept_.back());
        PrivateBuffer buffer = std::move(kept_.back());
        kept_.pop_back();
        return buffer;
      }
    }
    return PrivateBuffer::make(bytes > 0 ? bytes : 1);
  }
  void give(PrivateBuffer buffer) noexcept {
    const std::lock_guard lock(mutex_);
    if (kept_.size() < kKept) kept_.push_back(std::move(buffer));
  }
  BufferRecycler() { kept_.reserve(kKept); }

 private:
  std::mutex mutex_;
  std::vector<PrivateBuffer> kept_;
};

/// shared_ptr objects that return here when their last user releases them and whose members keep their capacity. Thread-safe.
template <class T>
class Recycler : public std::enable_shared_from_this<Recycler<T>> {
 public:
  static constexpr size_t kKept = 8;
  Recycler() { kept_.reserve(kKept); }

  std::shared_ptr<T> take() {
    std::unique_ptr<T> object;
    {
      const std::lock_guard lock(mutex_);
      if (!kept_.empty()) {
        object = std::move(kept_.back());
        kept_.pop_back();
      }
    }
    if (!object) object = std::make_unique<T>();
    return std::shared_ptr<T>(object.release(), [self = this->shared_from_this()](T* p) { self->give(std::unique_ptr<T>(p)); });
  }

 private:
  void give(std::unique_ptr<T> object) noexcept {
    const std::lock_guard lock(mutex_);
    if (kept_.size() < kKept) kept_.push_back(std::move(object));
  }
  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> kept_;
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#include "switchyard/row_memory.hpp"

#include <map>
#include <mutex>
#include <new>
#include <optional>

#include "base/mix_hash.hpp"
#include "exchange/group/device_rank.hpp"
#include "exchange/group/exchange_base.hpp"
#include "heap/offset_allocator.hpp"

namespace switchyard {

namespace detail {

class RowMemoryState final : public ExchangeBase {
 public:
  static constexpr size_t kAlignment = 512;

  RowMemoryState(Group& group, size_t bytes) : ExchangeBase(group) {
    construct("RowMemory", "the argument bytes of RowMemory", [&]() -> AgreedFields {
      if (bytes == 0) invalid_value("RowMemory: bytes", "0", "at least 1");
      const size_t begin = take_heap(bytes, 0);
      room_.emplace(begin, begin + bytes);
      base_ = group_.heap->view().base[rank()];
      block_ = {base_ + begin, bytes};
      return {agreed("RowMemory: bytes", bytes)};
    });
  }

  void* allocate(size_t bytes) {
    if (const auto offset = room_->allocate(bytes, kAlignment)) return base_ + *offset;
    std::shared_ptr<void> memory = group_.device ? group_.device->ordinary_memory(bytes) : memory_of_host(bytes);
    void* const at = memory.get();
    const std::lock_guard lock(mutex_);
    ordinary_.emplace(at, std::move(memory));
    return at;
  }

  void release(void* memory) noexcept {
    if (memory == nullptr) return;
    if (contains(memory)) return room_->release(static_cast<size_t>(static_cast<std::byte*>(memory) - base_));
    std::shared_ptr<void> gone;  // outside the lock: a GPU may have to be waited for
    const std::lock_guard lock(mutex_);
    if (const auto found = ordinary_.find(memory); found != ordinary_.end()) {
      gone = std::move(found->second);
      ordinary_.erase(found);
    }
  }

  bool contains(const void* memory) const noexcept {
    const auto* const at = static_cast<const std::byte*>(memory);
    return at >= block_.data() && at < block_.data() + block_.size();
  }

 private:
  static std::shared_ptr<void> memory_of_host(size_t bytes) {
    void* const memory = ::operator new(bytes, std::align_val_t(kAlignment), std::nothrow);
    if (memory == nullptr)
      throw Error(ErrorCode::system, "RowMemory: no " + std::to_string(bytes) + " bytes of ordinary memory");
    return {memory, [](void* given) { ::operator delete(given, std::align_val_t(kAlignment)); }};
  }

  std::byte* base_ = nullptr;  // of this rank's segment
  std::span<std::byte> block_;
  std::optional<OffsetAllocator> room_;
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<void>> ordinary_;
};

}  // namespace detail

RowMemory::RowMemory(Group& group, size_t bytes) : state_(std::make_unique<detail::RowMemoryState>(group, bytes)) {}
RowMemory::RowMemory() noexcept = default;
RowMemory::RowMemory(RowMemory&&) noexcept = default;
RowMemory& RowMemory::operator=(RowMemory&&) noexcept = default;
RowMemory::~RowMemory() = default;

void* RowMemory::allocate(size_t bytes) {
  if (!state_) throw Error(ErrorCode::invalid_argument, "RowMemory is empty: it was default-constructed or moved from");
  return state_->allocate(bytes);
}
void RowMemory::release(void* memory) noexcept {
  if (state_) state_->release(memory);
}
bool RowMemory::contains(const void* memory) const noexcept { return state_ && state_->contains(memory); }

}  // namespace switchyard

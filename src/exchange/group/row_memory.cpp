// SPDX-License-Identifier: Apache-2.0
#include "switchyard/row_memory.hpp"

#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <vector>

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
    construct("RowMemory", "more than the size of the RowMemory", [&]() -> AgreedFields {
      if (bytes == 0) invalid_value("RowMemory: bytes", "0", "at least 1");
      const size_t begin = take_heap(bytes, 0);
      allocator_.emplace(begin, begin + bytes);
      base_ = group_.heap->view().base[rank()];
      block_ = {base_ + begin, bytes};
      return {agreed("RowMemory: bytes", bytes)};
    });
  }

  ~RowMemoryState() {
    if (!group_.device) return;
    group_.device->end_block(give_up_heap(), [ending = std::move(ending_)]() mutable {
      std::erase_if(ending, [](const Ending& each) { return each.over(); });
      return ending.empty();
    });
  }

  /// `stream`: on GPUs, the stream whose work uses the memory.
  void* allocate(size_t bytes, void* stream) {
    sweep();
    if (const auto offset = allocator_->allocate(bytes, kAlignment)) return base_ + *offset;
    std::shared_ptr<void> memory = group_.device ? group_.device->ordinary_memory(bytes, stream) : memory_of_host(bytes);
    void* const at = memory.get();
    const std::lock_guard lock(mutex_);
    ordinary_.emplace(at, std::move(memory));
    return at;
  }

  /// Releases the memory. It is not reused until the work enqueued on `stream` so far is done.
  void release(void* memory, void* stream) noexcept {
    if (memory == nullptr) return;
    if (contains(memory)) return release_block(static_cast<size_t>(static_cast<std::byte*>(memory) - base_), stream);
    std::shared_ptr<void> gone;
    {
      const std::lock_guard lock(mutex_);
      const auto found = ordinary_.find(memory);
      if (found == ordinary_.end()) return;
      gone = std::move(found->second);
      ordinary_.erase(found);
    }
    mark_used(memory, stream);
  }

  /// Ordinary memory on a GPU is also freed after the work enqueued on `stream`.
  void mark_used(const void* memory, void* stream) const noexcept try {
    if (group_.device) group_.device->used_by("memory", memory, stream);
  } catch (const std::exception&) {
    // Not a usable stream; the uses at allocation are known.
  }

  bool contains(const void* memory) const noexcept {
    const auto* const at = static_cast<const std::byte*>(memory);
    return at >= block_.data() && at < block_.data() + block_.size();
  }

 private:
  /// A released range that is still in use.
  struct Ending {
    size_t offset;
    std::function<bool()> over;
  };
  void release_block(size_t offset, void* stream) noexcept {
    if (!group_.device) return allocator_->release(offset);
    try {
      Ending ending{offset, group_.device->end_of_use(stream)};
      const std::lock_guard lock(mutex_);
      ending_.push_back(std::move(ending));
    } catch (const std::exception&) {
      return;  // without a record the range stays taken
    }
    sweep();
  }
  /// Frees ranges that are no longer used.
  void sweep() noexcept {
    const std::lock_guard lock(mutex_);
    std::erase_if(ending_, [&](const Ending& each) {
      if (!each.over()) return false;
      allocator_->release(each.offset);
      return true;
    });
  }

  static std::shared_ptr<void> memory_of_host(size_t bytes) {
    void* const memory = ::operator new(bytes, std::align_val_t(kAlignment), std::nothrow);
    if (memory == nullptr)
      throw Error(ErrorCode::system, "RowMemory: no " + std::to_string(bytes) + " bytes of ordinary memory");
    return {memory, [](void* given) { ::operator delete(given, std::align_val_t(kAlignment)); }};
  }

  std::byte* base_ = nullptr;  // in this rank's segment
  std::span<std::byte> block_;
  std::optional<OffsetAllocator> allocator_;
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<void>> ordinary_;
  std::vector<Ending> ending_;
};

}  // namespace detail

RowMemory::RowMemory(Group& group, size_t bytes) : state_(std::make_unique<detail::RowMemoryState>(group, bytes)) {}
RowMemory::RowMemory() noexcept = default;
RowMemory::RowMemory(RowMemory&&) noexcept = default;
RowMemory& RowMemory::operator=(RowMemory&&) noexcept = default;
RowMemory::~RowMemory() = default;

void* RowMemory::allocate(size_t bytes, void* stream) {
  if (!state_) throw Error(ErrorCode::invalid_argument, "RowMemory is empty: it was default-constructed or moved from");
  return state_->allocate(bytes, stream);
}
void RowMemory::release(void* memory, void* stream) noexcept {
  if (state_) state_->release(memory, stream);
}
bool RowMemory::contains(const void* memory) const noexcept { return state_ && state_->contains(memory); }

}  // namespace switchyard

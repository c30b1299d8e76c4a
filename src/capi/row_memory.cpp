// SPDX-License-Identifier: Apache-2.0
// Symmetric memory for external allocators. Their functions have no state, so a table here maps each block to its owner.
#include "switchyard/row_memory.hpp"

#include <map>
#include <memory>
#include <mutex>

#include "capi/objects.hpp"
#include "switchyard/c/row_memory.h"

namespace switchyard::detail {

namespace {

using RowMemoryShare = std::shared_ptr<Grouped<RowMemory>>;

/// Allocated blocks and their owners. The table is never destroyed, because an allocator may free memory after the program's
/// static objects are destroyed.
struct Lent {
  std::mutex mutex;
  std::map<void*, RowMemoryShare> lender_of;
};
Lent& lent() {
  static auto* const all = new Lent;
  return *all;
}

thread_local std::weak_ptr<Grouped<RowMemory>> current_memory;

void* lend(const RowMemoryShare& lender, size_t bytes, void* stream) {
  void* const memory = lender->object.allocate(bytes, stream);
  try {
    const std::lock_guard lock(lent().mutex);
    lent().lender_of.emplace(memory, lender);
  } catch (...) {
    lender->object.release(memory, stream);
    throw;
  }
  return memory;
}

void take_back(void* memory, void* stream) {
  RowMemoryShare lender;  // outside the lock, because its group may be destroyed with it
  {
    const std::lock_guard lock(lent().mutex);
    const auto found = lent().lender_of.find(memory);
    if (found == lent().lender_of.end()) return;
    lender = std::move(found->second);
    lent().lender_of.erase(found);
  }
  lender->object.release(memory, stream);
}

}  // namespace

}  // namespace switchyard::detail

using namespace switchyard;
using namespace switchyard::detail;

// NOLINTBEGIN(readability-identifier-naming): names of the C ABI
struct sy_row_memory {
  RowMemoryShare state;
};
// NOLINTEND(readability-identifier-naming)

extern "C" {

sy_code sy_row_memory_create(sy_group* group, size_t bytes, sy_row_memory** memory) {
  return create(group, "memory", memory, [&] { return std::make_shared<Grouped<RowMemory>>(group->group, bytes); });
}

sy_code sy_row_memory_destroy(sy_row_memory* memory) {
  delete memory;
  return SY_OK;
}

sy_code sy_row_memory_use(const sy_row_memory* memory) {
  current_memory = memory ? memory->state : RowMemoryShare();
  return SY_OK;
}

void* sy_row_memory_allocate(ptrdiff_t bytes, int, void* stream) {
  void* memory = nullptr;
  const RowMemoryShare lender = current_memory.lock();
  if (bytes > 0 && lender) guarded([&] { memory = lend(lender, static_cast<size_t>(bytes), stream); });
  return memory;
}

void sy_row_memory_free(void* memory, ptrdiff_t, int, void* stream) {
  if (memory) guarded([&] { take_back(memory, stream); });
}

sy_code sy_group_used_by(sy_group* group, const void* memory, void* stream) {
  return guarded([&] {
    require(group, "group");
    group->group->used_by(memory, stream);
  });
}

}  // extern "C"

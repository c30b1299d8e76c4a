// SPDX-License-Identifier: Apache-2.0
// Selection of slots (SlotSelector) by the sending kernel: each block copies the table to shared memory while it loads the ids,
// and replaces each id as it stages it. One block counts the routes after its sends, off the critical path. The slots are
// those of the selection kernel, because both use SlotTable.
#pragma once

#include "exchange/low_latency/frame.cuh"
#include "exchange/slots/launch.hpp"

namespace switchyard::detail {

inline int64_t table_bytes(const SlotTable& table) {
  return table.words == nullptr ? 0 : SlotTable::num_words(table.num_experts, table.num_slots) * 4;
}

/// Call load() and share() from all threads of a block; lookups follow the next barrier.
class SlotLookup {
 public:
  __device__ SlotLookup(const SlotSelection& selection, const LowLatencyLayout& layout)
      : table_(selection.table),
        layout_(layout),
        num_words_(table_.words == nullptr ? 0 : static_cast<int>(SlotTable::num_words(table_.num_experts, table_.num_slots))),
        counts_(selection.counts) {}

  /// Loads this thread's first words of the table, which are in flight together with the ids.
  __device__ void load() {
#pragma unroll
    for (int a = 0; a < kEach; ++a)
      if (const int i = word(a); i < num_words_) early_[a] = table_.words[i];
  }
  /// The shape without the block's memory for the table.
  __device__ CudaShape without_table(CudaShape shape) const {
    if (shape.block_bytes > 0) shape.block_bytes -= static_cast<uint32_t>((num_words_ * 4 + 15) / 16 * 16);
    return shape;
  }
  /// Writes the table to the end of the block's shared memory.
  __device__ void share(std::byte* shared, const CudaShape& shape) {
    auto* const copy = reinterpret_cast<uint32_t*>(shared + shape.shared_bytes()) - num_words_;
#pragma unroll
    for (int a = 0; a < kEach; ++a)
      if (const int i = word(a); i < num_words_) copy[i] = early_[a];
#pragma unroll 1
    for (int i = word(kEach); i < num_words_; i += static_cast<int>(blockDim.x)) copy[i] = table_.words[i];
    table_.words = copy;
  }
  /// Returns the slot of a route.
  __device__ int64_t operator()(int64_t id, int route) const {
    return table_(id, layout_.by_topk.quotient(static_cast<uint32_t>(route)));
  }
  __device__ uint32_t version() const { return num_words_ > 0 ? table_.version() : 0; }
  /// Counts the first `routes` routes. All blocks replace all ids; only the last block, which sends the fewest messages, reads
  /// them again and counts them. Call from all threads after the block's sends: their release would wait for earlier counts.
  __device__ void count(const IdReader& ids, int routes) const {
    if (blockIdx.x + 1 != gridDim.x) return;
#pragma unroll 1
    for (auto i = static_cast<int>(threadIdx.x); i < routes; i += static_cast<int>(blockDim.x))
      if (const int64_t id = ids.raw(i); id >= 0 && id < table_.num_experts) atomicAdd(counts_ + id, 1ull);
  }

 private:
  static constexpr int kEach = 2;
  __device__ int word(int a) const { return static_cast<int>(threadIdx.x) + a * static_cast<int>(blockDim.x); }

  SlotTable table_;
  const LowLatencyLayout& layout_;
  int num_words_;
  unsigned long long* counts_;
  uint32_t early_[kEach] = {};
};

}  // namespace switchyard::detail

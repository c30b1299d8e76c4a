// SPDX-License-Identifier: Apache-2.0
#include "exchange/group/remote_headers.hpp"

#include <atomic>

#include "arch/cpu/cpu_arch.hpp"

namespace switchyard::detail {

std::vector<uint64_t> RemoteHeaders::calls_after(uint64_t known, uint64_t& last) const {
  constexpr uint64_t kKept = HeapHeader::kCallsKept;
  last = Cpu::peek(&mine_->num_calls);
  const uint64_t first = last > known + kKept ? last - kKept + 1 : known + 1;
  std::vector<uint64_t> words;
  for (uint64_t n = first; n <= last; ++n) words.push_back(Cpu::peek(&mine_->calls[n % kKept]));
  return words;
}

void RemoteHeaders::heard_calls(int rank, uint64_t last, std::span<const uint64_t> words) {
  HeapHeader& theirs = *of(rank);
  uint64_t number = last - words.size();
  for (const uint64_t word : words)
    std::atomic_ref(theirs.calls[++number % HeapHeader::kCallsKept]).store(word, std::memory_order_release);
  std::atomic_ref(theirs.num_calls).store(last, std::memory_order_release);
}

void RemoteHeaders::heard_abort(uint64_t word) {
  uint64_t none = 0;
  std::atomic_ref(mine_->abort_word).compare_exchange_strong(none, word, std::memory_order_acq_rel);
}

void RemoteHeaders::heard_leave(int rank) {
  std::atomic_ref(of(rank)->left_ns).store(Cpu::now_ns(), std::memory_order_release);
  std::atomic_ref(mine_->left_ranks).fetch_or(uint64_t{1} << rank, std::memory_order_acq_rel);
}

}  // namespace switchyard::detail

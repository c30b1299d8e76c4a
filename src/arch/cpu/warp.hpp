// SPDX-License-Identifier: Apache-2.0
// A warp of the CPU arch: one thread and its state. Created by WorkerPool (or by a test) and used by one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "arch/cpu/block_barrier.hpp"
#include "arch/cpu/pending_queue.hpp"

namespace switchyard::detail {

inline constexpr size_t kCacheLine = 64;
inline constexpr size_t kDefaultScratchBytes = size_t{128} << 10;

class alignas(kCacheLine) CpuWarp {
 public:
  /// `barrier` is shared by the warps of one block and outlives them; it may be null if block_sync is never called.
  CpuWarp(int block, int warp, int num_blocks, int warps_per_block, BlockBarrier* barrier)
      : block_(block), warp_(warp), num_blocks_(num_blocks), warps_per_block_(warps_per_block), barrier_(barrier) {
    reserve_scratch(kDefaultScratchBytes);
  }
  CpuWarp(const CpuWarp&) = delete;
  CpuWarp& operator=(const CpuWarp&) = delete;

  int block() const noexcept { return block_; }
  int warp() const noexcept { return warp_; }
  int num_blocks() const noexcept { return num_blocks_; }
  int warps_per_block() const noexcept { return warps_per_block_; }
  int index() const noexcept { return block_ * warps_per_block_ + warp_; }
  int total() const noexcept { return num_blocks_ * warps_per_block_; }

  /// Private staging memory of scratch_bytes() bytes, aligned to 64 bytes. Its contents persist between calls.
  std::byte* scratch() noexcept { return scratch_.get(); }
  size_t scratch_bytes() const noexcept { return scratch_bytes_; }
  /// Grows the scratch memory to at least `bytes`, discarding its contents if it grows. Allocates memory, so call it between
  /// exchanges.
  void reserve_scratch(size_t bytes) {
    if (bytes <= scratch_bytes_) return;
    const size_t rounded = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    scratch_.reset(static_cast<std::byte*>(::operator new (rounded, std::align_val_t{kCacheLine})));
    scratch_bytes_ = rounded;
  }

  BlockBarrier* barrier() noexcept { return barrier_; }
  /// Pending ops of the deferred arch.
  PendingQueue& pending() noexcept { return pending_; }

  /// True if non-temporal stores by this warp may still be incomplete.
  bool streamed() const noexcept { return streamed_; }
  void add_streamed(bool streamed) noexcept { streamed_ |= streamed; }
  void clear_streamed() noexcept { streamed_ = false; }

 private:
  struct AlignedDelete {
    void operator()(std::byte* p) const noexcept { ::operator delete (p, std::align_val_t{kCacheLine}); }
  };

  int block_;
  int warp_;
  int num_blocks_;
  int warps_per_block_;
  bool streamed_ = false;
  BlockBarrier* barrier_;
  std::unique_ptr<std::byte, AlignedDelete> scratch_;
  size_t scratch_bytes_ = 0;
  PendingQueue pending_;
};

}  // namespace switchyard::detail

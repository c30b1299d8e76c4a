// SPDX-License-Identifier: Apache-2.0
// Copies a row to many destinations with one warp: in bulk through its shared memory, or with its lanes. cuda_arch.cuh
// documents the ordering.
#pragma once

#include "arch/cuda/cuda_rows.cuh"
#include "arch/cuda/cuda_warp.cuh"

namespace switchyard::detail {

/// All lanes must call each function together with identical arguments (except `mine`). kBulk: rows may be copied in bulk.
template <bool kBulk>
struct CudaMover {
  /// Smaller copies are performed by the lanes: 1 KiB takes two 16-byte accesses per lane.
  static constexpr size_t kBulkMinBytes = 1024;

  /// Copies to up to 32 destinations, held by the given lanes in `mine`.
  __device__ static void multicast_group(CudaWarp& w, void* mine, unsigned lanes, const void* src, size_t bytes) {
    constexpr unsigned kNotGlobal = 16;
    unsigned low_bits = static_cast<unsigned>(reinterpret_cast<uintptr_t>(mine)) & 15u;
    if (kBulk && mine != nullptr && !__isGlobal(mine)) low_bits |= kNotGlobal;
    low_bits = __reduce_or_sync(kAllLanes, low_bits) | (static_cast<unsigned>(reinterpret_cast<uintptr_t>(src)) & 15u);
    if constexpr (kBulk && ptx::kHasBulkCopies) {
      const bool bulk = low_bits == 0 && bytes % 16 == 0 && bytes >= kBulkMinBytes && w.stage_bytes_ > 0;
      if (bulk && __isGlobal(src)) return multicast_bulk(w, mine, lanes, static_cast<const std::byte*>(src), bytes);
      if (bulk && __isShared(src)) return multicast_from_shared(w, mine, lanes, src, bytes);
    }
    multicast_lanes(w.lane_, mine, lanes, static_cast<const std::byte*>(src), bytes, low_bits);
    w.lane_writes_ = true;
  }

  /// Waits for the pending load and issues its stores.
  __device__ static void store_pending(CudaWarp& w) {
    if constexpr (!kBulk) return;
    const unsigned lanes = w.pending_lanes_;
    if (lanes == 0) return;
    const int stage = w.pending_stage_;
    const uint32_t bar = w.bars_ + static_cast<uint32_t>(stage) * 8;
    while (!ptx::mbarrier_try_wait(bar, (w.parity_ >> stage) & 1u)) {
    }
    w.parity_ ^= 1u << stage;
    store_from(w, w.pending_dst_, lanes, w.stage_ + static_cast<uint32_t>(stage) * w.stage_bytes_, w.pending_bytes_);
    w.pending_lanes_ = 0;
  }

  /// Orders earlier ordinary accesses to global memory before later bulk copies. Copies out of shared memory have a fence of
  /// their own (multicast_from_shared).
  __device__ static void fence_bulk() {
    if constexpr (kBulk) ptx::fence_proxy_async_global();
  }

 private:
  __device__ static void multicast_bulk(CudaWarp& w, void* mine, unsigned lanes, const std::byte* src, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
      const size_t left = bytes - at;
      const uint32_t piece = left < w.stage_bytes_ ? static_cast<uint32_t>(left) : w.stage_bytes_;
      const int stage = w.stages_ == 1 ? 0 : w.pending_stage_ ^ 1;
      if (w.stages_ == 1) store_pending(w);
      const uint32_t bar = w.bars_ + static_cast<uint32_t>(stage) * 8;
      if (w.lane_ == 0) {
        ptx::bulk_wait_read();  // waits for the reads of the stores from this stage
        ptx::mbarrier_expect(bar, piece);
        ptx::bulk_load(w.stage_ + static_cast<uint32_t>(stage) * w.stage_bytes_, src + at, piece, bar);
      }
      store_pending(w);  // two stages: the previous row
      w.pending_stage_ = stage;
      w.pending_dst_ = mine == nullptr ? nullptr : static_cast<std::byte*>(mine) + at;
      w.pending_lanes_ = lanes;
      w.pending_bytes_ = piece;
      at += piece;
    }
  }

  /// Sends rows that the lanes have written to shared memory (scratch).
  __device__ static void multicast_from_shared(CudaWarp& w, void* mine, unsigned lanes, const void* src, size_t bytes) {
    store_pending(w);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    store_from(w, mine, lanes, ptx::shared_address(src), static_cast<uint32_t>(bytes));
  }

  __device__ static void store_from(CudaWarp& w, void* mine, unsigned lanes, uint32_t shared, uint32_t bytes) {
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      const auto dst = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), __ffs(static_cast<int>(left)) - 1);
      if (w.lane_ == 0) ptx::bulk_store(reinterpret_cast<void*>(dst), shared, bytes);
    }
    if (w.lane_ == 0) ptx::bulk_commit();
  }
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// The op list on CUDA: a warp is 32 lanes. Written for sm_90; on sm_80 to sm_89 rows are moved by the lanes only.
//
// Rows move by bulk copies through shared memory if addresses and size are multiples of 16 and the size justifies it; otherwise
// the lanes load and store them. A bulk copy is split in two: its load is issued at once, its stores by the warp's next op that
// moves or settles. The computation of the next row's addresses and, with two stages, the load of the next row thus overlap
// with the copy, without any change to protocol code.
//
// Ordering:
// - lanes' ordinary stores -> release: __syncwarp, then the releasing lane's fence or st.release (cumulative);
// - bulk stores -> release: wait_group 0 by the lane that issued them (implies the proxy fence), __syncwarp, release;
// - acquire -> bulk load: fence.proxy.async.global after every acquire, because ordinary stores may have written the bytes;
// - bulk store's read of shared memory -> refill: wait_group.read, __syncwarp.
// A warp must settle before its kernel ends. The only unbounded waits are for this GPU's own copy engine, never for a peer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/cuda/cuda_mover.cuh"
#include "arch/cuda/cuda_quantize.cuh"
#include "arch/cuda/cuda_sentinel.cuh"
#include "arch/cuda/cuda_warp.cuh"
#include "arch/cuda/ptx.cuh"
#include "arch/ops.hpp"

namespace switchyard::detail {

/// kBulk: long rows move by bulk copies through shared memory (see the top of this file). If false, the lanes move all rows.
/// This is faster for short rows, which would take longer through shared memory, and makes kernels smaller. kInlineAll: every
/// op is inlined, without a stack frame. It is intended for kernels in which all code runs once, where a jump to cold code
/// costs more than the code itself. Restrictions, which launchers check:
///   - rows are aligned to 16 bytes and multiples of 16 bytes long;
///   - quantized rows are bf16;
///   - sums have no bias;
///   - there are at most 32 places.
/// Row types should then be constants; otherwise the kernel contains code for every type.
template <bool kBulk, bool kInlineAll = false>
struct CudaArch : CudaMover<kBulk> {
  static_assert(!kBulk || !kInlineAll);
  using Warp = CudaWarp;
  /// Number of polls before a waiting warp starts to sleep, i.e. after some tens of microseconds.
  static constexpr int kPollsBeforeSleep = 64;
  static constexpr int kTakenAtOnce = 1;

  __device__ static void copy(Warp& w, void* dst, const void* src, size_t bytes) {
    if constexpr (kInlineAll) {
      multicast_whole<false>(w.lane_, w.lane_ == 0 ? dst : nullptr, fetch_whole<uint4>(w.lane_, src, bytes));
      w.lane_writes_ = true;
    } else {
      if (bytes > 0) multicast_group(w, w.lane_ == 0 ? dst : nullptr, 1u, src, bytes);
    }
  }

  template <class F>
  __device__ static void multicast_to(Warp& w, int n, F&& f, const void* src, size_t bytes) {
    if constexpr (kInlineAll) {
      multicast_fetched(w, n, f, fetch(w, src, bytes));
    } else {
      SWITCHYARD_ROLLED
      for (int base = 0; base < n; base += kLanes) {
        void* const mine = base + w.lane_ < n ? static_cast<void*>(f(base + w.lane_)) : nullptr;
        const unsigned lanes = __ballot_sync(kAllLanes, mine != nullptr);
        if (lanes != 0 && bytes > 0) multicast_group(w, mine, lanes, src, bytes);
      }
    }
  }

  /// A row whose contents are not read until it is copied.
  struct LaterRow {
    const void* src;
    size_t bytes;
  };
  template <class V>
  using FetchedRow = std::conditional_t<kInlineAll, FetchedVectors<V>, LaterRow>;

  __device__ static FetchedRow<uint4> fetch(Warp& w, const void* src, size_t bytes) { return fetch_as<uint4>(w, src, bytes); }
  __device__ static FetchedRow<uint32_t> fetch_words(Warp& w, const void* src, size_t bytes) {
    return fetch_as<uint32_t>(w, src, bytes);
  }
  template <class F, class Row>
  __device__ static void multicast_fetched(Warp& w, int n, F&& f, const Row& row) {
    if constexpr (kInlineAll) {
      multicast_whole<false>(w.lane_, w.lane_ < n ? static_cast<void*>(f(w.lane_)) : nullptr, row);
      w.lane_writes_ = true;
    } else {
      multicast_to(w, n, f, row.src, row.bytes);
    }
  }

  template <class F>
  __device__ static uint64_t lanes_where(Warp& w, int n, F&& f) {
    if constexpr (kInlineAll) {
      return __ballot_sync(kAllLanes, w.lane_ < n && f(w.lane_));
    } else {
      uint64_t mask = 0;
      SWITCHYARD_ROLLED
      for (int base = 0; base < n; base += kLanes) {
        const int i = base + w.lane_;
        mask |= static_cast<uint64_t>(__ballot_sync(kAllLanes, i < n && f(i))) << base;
      }
      return mask;
    }
  }

  template <class F>
  __device__ static uint64_t lanes_union(Warp& w, int n, F&& f) {
    if constexpr (kInlineAll) {
      return __reduce_or_sync(kAllLanes, w.lane_ < n ? static_cast<unsigned>(f(w.lane_)) : 0u);
    } else {
      uint64_t mine = 0;
      SWITCHYARD_ROLLED
      for (int i = w.lane_; i < n; i += kLanes) mine |= f(i);
      const unsigned low = __reduce_or_sync(kAllLanes, static_cast<unsigned>(mine));
      return static_cast<uint64_t>(__reduce_or_sync(kAllLanes, static_cast<unsigned>(mine >> 32))) << 32 | low;
    }
  }

  template <class F>
  __device__ static int64_t count_where(Warp& w, int64_t n, F&& f) {
    constexpr int kAhead = 4;  // several loads are in flight
    int mine = 0;
    SWITCHYARD_ROLLED
    for (int64_t base = w.lane_; base < n; base += kAhead * kLanes) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (base + a * kLanes < n) mine += static_cast<int>(f(base + a * kLanes));
    }
    return __reduce_add_sync(kAllLanes, mine);
  }

  template <class F>
  __device__ static Located locate(Warp& w, int64_t index, int n, F&& length) {
    SWITCHYARD_ROLLED
    for (int base = 0; base < n; base += kLanes) {
      const int64_t here = base + w.lane_ < n ? length(base + w.lane_) : 0;
      int64_t end = here;  // of this lane's segment, from the first of the 32
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) {
        if (kInlineAll && step >= n) break;
        const int64_t before = __shfl_up_sync(kAllLanes, end, step);
        if (w.lane_ >= step) end += before;
      }
      const unsigned past = __ballot_sync(kAllLanes, index < end);
      if (past != 0) {
        const int found = __ffs(static_cast<int>(past)) - 1;
        return {base + found, index - __shfl_sync(kAllLanes, end - here, found)};
      }
      index -= __shfl_sync(kAllLanes, end, kLanes - 1);
    }
    return {n, index};
  }

  template <class F>
  __device__ static Located locate_many(Warp& w, int64_t index, int n, F&& length) {
    if constexpr (kInlineAll) {
      return locate_pairs(w, static_cast<uint32_t>(index), n, length);
    } else {
      return locate(w, index, n, length);
    }
  }

  /// Processes two segments per lane, so that 64 segments take one step.
  template <class F>
  __device__ static Located locate_pairs(Warp& w, uint32_t index, int n, F&& length) {
    SWITCHYARD_ROLLED
    for (int base = 0; base < n; base += 2 * kLanes) {
      const int at = base + 2 * w.lane_, lanes = (n - base + 1) / 2;
      const uint32_t first = at < n ? static_cast<uint32_t>(length(at)) : 0;
      const uint32_t both = first + (at + 1 < n ? static_cast<uint32_t>(length(at + 1)) : 0);
      uint32_t end = both;  // of this lane's segments, from the first of the 64
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) {
        if (step >= lanes) break;
        const uint32_t before = __shfl_up_sync(kAllLanes, end, step);
        if (w.lane_ >= step) end += before;
      }
      const unsigned past = __ballot_sync(kAllLanes, index < end);
      if (past != 0) {
        const int found = __ffs(static_cast<int>(past)) - 1;
        const uint32_t offset = index - __shfl_sync(kAllLanes, end - both, found), split = __shfl_sync(kAllLanes, first, found);
        const bool second = offset >= split;
        return {base + 2 * found + static_cast<int>(second), offset - (second ? split : 0)};
      }
      index -= __shfl_sync(kAllLanes, end, kLanes - 1);
    }
    return {n, index};
  }

  __device__ static void fill_zero(Warp& w, void* dst, size_t bytes) {
    fill_zero_lanes(w.lane_, static_cast<std::byte*>(dst), bytes);
    w.lane_writes_ = true;
  }

  __device__ static void drain_sources(Warp& w) {
    store_pending(w);
    if (kBulk && w.lane_ == 0) ptx::bulk_wait_read();
    __syncwarp();
  }

  __device__ static void settle(Warp& w) {
    store_pending(w);
    if (kBulk && w.lane_ == 0) ptx::bulk_wait();
    if (w.lane_writes_) fence_bulk();  // a later copy of this warp may read them in bulk
    w.lane_writes_ = false;
    __syncwarp();
  }

  __device__ static void reduce_rows(Warp& w, const ReduceSpec& spec) {
    const auto set_from = [&](int base) {
      const int i = base + w.lane_;
      const bool mine = i < spec.n;
      const float weight = mine && spec.weights != nullptr ? spec.weights[i] : 0.0f;
      return LaneRows{mine ? spec.rows[i] : nullptr, weight, __ballot_sync(kAllLanes, mine), spec.weights != nullptr};
    };
    if (spec.n <= kLanes)
      reduce_lane_rows(w.lane_, spec, set_from(0));
    else
      reduce_two_sets(w.lane_, spec, set_from(0), set_from(kLanes));
    w.lane_writes_ = true;
  }

  template <int kMaxPlaces = kMaxRanks, class Row, class Weight>
  __device__ static void reduce_rows_from(Warp& w, const ReduceSpec& spec, int places, bool weighted, Row&& row_of,
                                          Weight&& weight_of) {
    const auto set_from = [&](int base) {
      const int i = base + w.lane_;
      const void* const row = i < places ? static_cast<const void*>(row_of(i)) : nullptr;
      const float weight = row != nullptr && weighted ? weight_of(i) : 0.0f;
      return LaneRows{row, weight, __ballot_sync(kAllLanes, row != nullptr), weighted};
    };
    const LaneRows rows = set_from(0);
    if constexpr (kInlineAll) {
      with_row_type(spec.type, [&]<DType T>() {
        reduce_whole<T>(w.lane_, static_cast<uint4*>(spec.out), rows.row, weighted ? rows.weight : 1.0f, rows.lanes,
                        static_cast<int>(spec.hidden) / RowElements<T>::kPerVector, spec.sentinel);
      });
    } else if (kMaxPlaces <= kLanes || places <= kLanes) {
      reduce_lane_rows(w.lane_, spec, rows);
    } else {
      static_assert(kMaxPlaces <= 2 * kLanes);
      reduce_two_sets(w.lane_, spec, rows, set_from(kLanes));
    }
    w.lane_writes_ = true;
  }

  template <class F>
  __device__ static void map_row(Warp& w, void* out, const void* src, DType type, int64_t hidden, F&& f,
                                 bool sentinel = false) {
    map_row_lanes(w.lane_, out, src, type, hidden, f, sentinel);
    w.lane_writes_ = true;
  }

  template <class F>
  __device__ static void multicast_sentinel(Warp& w, int n, F&& f, const void* src, size_t bytes,
                                            const Sentinel& as = sentinel_sums()) {
    if constexpr (kInlineAll) {
      void* const mine = w.lane_ < n ? static_cast<void*>(f(w.lane_)) : nullptr;
      multicast_whole<true>(w.lane_, mine, fetch_whole<uint4>(w.lane_, src, bytes), as);
    } else {
      multicast_sentinel_places(w.lane_, n, f, static_cast<const std::byte*>(src), static_cast<int64_t>(bytes), as);
    }
    w.lane_writes_ = true;
  }

  __device__ static bool has_arrived(Warp& w, const void* row, size_t bytes, const Sentinel& as) {
    return missing_lane(w.lane_, row, 1u, static_cast<int64_t>((bytes + 3) / 4), 0, as.blank) < 0;
  }
  __device__ static void blank_row(Warp& w, void* row, size_t bytes, const Sentinel& as) {
    blank_lanes(w.lane_, row, static_cast<int64_t>((bytes + 3) / 4), as.blank);
    w.lane_writes_ = true;
  }

  template <class Row, class Weight>
  __device__ static int reduce_if_arrived(Warp& w, const ReduceSpec& spec, int places, bool weighted, Row&& row_of,
                                          Weight&& weight_of, int looks, const Sentinel& as = sentinel_sums()) {
    w.lane_writes_ = true;
    if constexpr (kInlineAll) {
      const void* const row = w.lane_ < places ? static_cast<const void*>(row_of(w.lane_)) : nullptr;
      return reduce_if_arrived_inline(w.lane_, spec, row, row != nullptr && weighted ? weight_of(w.lane_) : 1.0f, looks, as);
    } else {
      return reduce_if_arrived_places(w.lane_, places, static_cast<int64_t>(dtype_bytes(spec.type, spec.hidden)), row_of, looks,
                                      as, [&] { reduce_rows_from(w, spec, places, weighted, row_of, weight_of); });
    }
  }

  __device__ static void quantize_row(Warp& w, uint8_t* q, void* scales, const void* src, DType type, int64_t hidden,
                                      ScaleKind kind, int group = kScaleGroup) {
    const unsigned low_bits = static_cast<unsigned>(reinterpret_cast<uintptr_t>(q));
    quantize_row_lanes<1, 2>(w.lane_, LaneTargets{q, scales, 1u, low_bits}, src, type, hidden, kind, group);
    zero_scale_padding(w.lane_, scales, hidden, kind, group);
    fence_bulk();  // complete on return, also for a bulk copy out of q in global memory
    __syncwarp();
  }

  template <class F>
  __device__ static void quantize_to(Warp& w, int n, F&& f, const void* src, DType type, int64_t hidden, ScaleKind kind,
                                     int group) {
    if constexpr (kInlineAll) {
      const QuantizedRow mine = w.lane_ < n ? f(w.lane_) : QuantizedRow{nullptr, nullptr};
      quantize_inline(w.lane_, LaneTargets{mine.q, mine.scales, __ballot_sync(kAllLanes, mine.q != nullptr), 0}, src,
                      static_cast<int>(hidden), kind, group);
    } else {
      SWITCHYARD_ROLLED
      for (int base = 0; base < n; base += kLanes) {
        const QuantizedRow mine = base + w.lane_ < n ? f(base + w.lane_) : QuantizedRow{nullptr, nullptr};
        const unsigned low_bits = __reduce_or_sync(kAllLanes, static_cast<unsigned>(reinterpret_cast<uintptr_t>(mine.q)));
        const LaneTargets to{mine.q, mine.scales, __ballot_sync(kAllLanes, mine.q != nullptr), low_bits};
        if (to.lanes != 0) quantize_row_lanes<kBulk ? 1 : 2, 1>(w.lane_, to, src, type, hidden, kind, group);
      }
    }
    w.lane_writes_ = true;
  }

  template <Scope S>
  __device__ static uint64_t load_acquire(const uint64_t* flag, Site) {
    uint64_t value = 0;
    if (lane_id() == 0) value = ptx::load_acquire<S>(flag);
    __syncwarp();
    fence_bulk();
    return __shfl_sync(kAllLanes, value, 0);
  }

  template <Scope S>
  __device__ static void store_release(Warp& w, uint64_t* flag, uint64_t value, Site) {
    __syncwarp();
    if (w.lane_ == 0) ptx::store_release<S>(flag, value);
  }

  template <Scope S, class F>
  __device__ static void publish_to(Warp& w, int n, F&& f, Site) {
    __syncwarp();
    ptx::fence_acq_rel<S>();  // in every lane, because a relaxed store is a release only after a fence of its own thread
    store_flags<S>(w, n, f);
  }

  /// The kernel's prologue has already fenced this warp (fence_entry), in parallel with the first loads of the call.
  template <class F>
  __device__ static void publish_entry(Warp& w, int n, F&& f, Site) {
    store_flags<Scope::system>(w, n, f);
  }

  // Each lane acquires separately, because a fence after relaxed loads would also wait for this warp's own stores.
  template <Scope S, class F>
  __device__ static int poll_from(Warp& w, int n, F&& f, uint64_t value, Site) {
    SWITCHYARD_ROLLED
    for (int base = 0; base < n; base += kLanes) {
      const int i = base + w.lane_;
      const bool missing = i < n && !flag_reached(ptx::load_acquire<S>(f(i)), value);
      const unsigned all_missing = __ballot_sync(kAllLanes, missing);
      if (all_missing != 0) return base + __ffs(static_cast<int>(all_missing)) - 1;
    }
    __syncwarp();
    fence_bulk();
    return -1;
  }

  template <Scope S>
  __device__ static uint64_t fetch_add(Warp& w, uint64_t* counter, uint64_t value, Site) {
    uint64_t old = 0;
    __syncwarp();
    if (w.lane_ == 0) old = ptx::add_acq_rel<S>(counter, value);
    __syncwarp();
    fence_bulk();
    return __shfl_sync(kAllLanes, old, 0);
  }

  __device__ static uint64_t take(Warp& w, uint64_t* counter, uint64_t value) {
    uint64_t old = 0;
    if (w.lane_ == 0) old = ptx::add_relaxed(counter, value);
    return __shfl_sync(kAllLanes, old, 0);
  }

  __device__ static void post(Warp& w, uint64_t* flag, uint64_t value) {
    if (w.lane_ == 0) ptx::store_relaxed<Scope::system>(flag, value);
  }
  __device__ static uint64_t peek(const uint64_t* flag) { return ptx::load_relaxed<Scope::system>(flag); }

  __device__ static void block_sync(Warp&) {
    __syncthreads();
    fence_bulk();
  }

  __device__ static void prefetch(Warp& w, const void* src, size_t bytes) {
    prefetch_lanes(w.lane_, src, static_cast<int>(bytes));
  }

  // Uses reductions in memory to avoid the latency of a load.
  __device__ static void count(Warp& w, uint64_t* statistic, uint64_t value) {
    if (w.lane_ == 0) ptx::reduce_add(statistic, value);
  }
  __device__ static void count_max(Warp& w, uint64_t* statistic, uint64_t value) {
    if (w.lane_ == 0) ptx::reduce_max(statistic, value);
  }

  template <class F>
  __device__ static void for_lanes(Warp& w, int64_t n, F&& f) {
    SWITCHYARD_ROLLED
    for (int64_t i = w.lane_; i < n; i += kLanes) f(static_cast<int>(i));
    w.lane_writes_ = true;
  }

  template <class F, class... Args>
  __device__ static bool out_of_line(Warp&, F, Args... args) {
    return called<F>(args...);
  }
  template <class F, class... Args>
  __device__ static bool out_of_line_if_cheap(Warp& w, F f, Args... args) {
    if constexpr (kInlineAll)
      return f(w, args...);
    else
      return called<F>(args...);
  }

  /// The time in nanoseconds, identical in all lanes.
  __device__ static uint64_t now_ns() { return __shfl_sync(kAllLanes, ptx::global_timer(), 0); }

  __device__ static void pause(Warp&, int64_t polls) {
    if (polls > kPollsBeforeSleep) __nanosleep(polls > 16 * kPollsBeforeSleep ? 500 : 100);
  }

 private:
  using Mover = CudaMover<kBulk>;
  using Mover::fence_bulk, Mover::multicast_group, Mover::store_pending;

  template <Scope S, class F>
  __device__ static void store_flags(Warp& w, int n, F&& f) {
    SWITCHYARD_ROLLED
    for (int i = w.lane_; i < n; i += kLanes) {
      const FlagStore store = f(i);
      if (store.flag != nullptr) ptx::store_relaxed<S>(store.flag, store.value);
    }
  }

  template <class V>
  __device__ static FetchedRow<V> fetch_as(Warp& w, const void* src, size_t bytes) {
    if constexpr (kInlineAll) {
      return fetch_whole<V>(w.lane_, src, bytes);
    } else {
      prefetch(w, src, bytes);
      return {src, bytes};
    }
  }

  /// Calls F out of line with a warp that has only a position. The caller's warp is not passed, because taking its address
  /// would keep it out of registers everywhere.
  template <class F, class... Args>
  __device__ __noinline__ static bool called(Args... args) {
    CudaWarp bare{CudaWarp::Bare{}};
    return F{}(bare, args...);
  }

  __device__ static int lane_id() { return static_cast<int>(threadIdx.x) % kLanes; }
};

using Cuda = CudaArch<true>;
using CudaLanes = CudaArch<false>;
using CudaInline = CudaArch<false, true>;

static_assert(Arch<Cuda> && Arch<CudaLanes> && Arch<CudaInline>);

}  // namespace switchyard::detail

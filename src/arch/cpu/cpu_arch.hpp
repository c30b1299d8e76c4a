// SPDX-License-Identifier: Apache-2.0
// The CPU arch: a warp is one thread, a row op is SIMD code, and a flag is a std::atomic_ref on symmetric memory. `Cpu` is the
// production arch. `CpuDeferred` defers row moves and reductions until drain_sources or settle. Protocol code that omits either
// call, or relies on an order among pending ops, therefore delivers wrong rows on any machine.
#pragma once

#include <algorithm>
#include <chrono>

#include "arch/cpu/order_table.hpp"
#include "arch/cpu/polite_wait.hpp"
#include "arch/cpu/row_ops.hpp"
#include "arch/cpu/sentinel.hpp"
#include "arch/cpu/warp.hpp"
#include "arch/ops.hpp"
#include "base/number_formats.hpp"

namespace switchyard::detail {

template <bool kDeferred>
struct BasicCpu {
  using Warp = CpuWarp;
  static constexpr bool kDefersCopies = kDeferred;
  static constexpr bool kHostTracing = true;  ///< WarpSpan records into the rank's Tracer
  /// All ranks make the calls of their group in the same order, one at a time, and publish them (HeapHeader::calls).
  static constexpr bool kCallsInOrder = true;
  /// Ranks may be on several hosts; segments on other hosts have no address (HeapView::base).
  static constexpr bool kSpansHosts = true;
  /// Number of rows claimed at a time; larger than one because an atomic addition waits for all earlier streaming stores.
  static constexpr int kTakenAtOnce = 8;

  static void copy(Warp& w, void* dst, const void* src, size_t bytes) {
    if constexpr (kDeferred) {
      w.pending().add_copy(dst, src, bytes);
    } else {
      w.add_streamed(copy_row(dst, src, bytes));
    }
  }

  template <class F>
  static void multicast_to(Warp& w, int n, F&& f, const void* src, size_t bytes) {
    void* dsts[64] = {};
    int count = 0;
    for (int i = 0; i < n; ++i)
      if (void* dst = f(i)) dsts[count++] = dst;
    if constexpr (kDeferred) {
      w.pending().add_multicast(dsts, count, src, bytes);
    } else {
      w.add_streamed(multicast_row(dsts, count, src, bytes));
    }
  }

  static void fill_zero(Warp& w, void* dst, size_t bytes) {
    if constexpr (kDeferred) {
      w.pending().add_zero(dst, bytes);
    } else {
      w.add_streamed(zero_row(dst, bytes));
    }
  }

  static void drain_sources(Warp& w) {
    if constexpr (kDeferred) w.pending().perform();
  }

  static void settle(Warp& w) {
    if constexpr (kDeferred) w.pending().perform();
    if (w.streamed()) {
      flush_streams();
      w.clear_streamed();
    }
  }

  static void reduce_rows(Warp& w, const ReduceSpec& spec) {
    if (spec.sentinel) {
      drain_sources(w);  // pending copies may still read the scratch
      ReduceSpec made = spec;
      made.out = w.scratch();
      (void)detail::reduce_rows(made, false);
      return write_sentinel_row(spec.out, w.scratch(), dtype_bytes(spec.type, spec.hidden), sentinel_sums());
    }
    if constexpr (kDeferred) {
      w.pending().add_reduce(spec);
    } else {
      w.add_streamed(detail::reduce_rows(spec));
    }
  }

  template <int kMaxPlaces = kMaxRanks, class Row, class Weight>
  static void reduce_rows_from(Warp& w, const ReduceSpec& given, int places, bool weighted, Row&& row_of, Weight&& weight_of) {
    const void* rows[kMaxRanks];
    float weights[kMaxRanks];
    ReduceSpec spec = given;
    spec.n = 0;
    for (int i = 0; i < places; ++i) {
      rows[spec.n] = row_of(i);
      if (rows[spec.n]) weights[spec.n++] = weighted ? weight_of(i) : 0.0f;
    }
    spec.rows = rows;
    spec.weights = weighted ? weights : nullptr;
    reduce_rows(w, spec);
  }

  template <class F>
  static void multicast_sentinel(Warp&, int n, F&& f, const void* src, size_t bytes, const Sentinel& as = sentinel_sums()) {
    for (int i = 0; i < n; ++i)
      if (void* dst = f(i)) write_sentinel_row(dst, src, bytes, as);
  }

  static bool has_arrived(Warp&, const void* row, size_t bytes, const Sentinel& as) { return row_has_arrived(row, bytes, as); }
  static void blank_row(Warp&, void* row, size_t bytes, const Sentinel& as) { detail::blank_row(row, bytes, as); }

  template <class Row, class Weight>
  static int reduce_if_arrived(Warp& w, const ReduceSpec& spec, int places, bool weighted, Row&& row_of, Weight&& weight_of,
                               int, const Sentinel& as = sentinel_sums()) {
    const size_t bytes = dtype_bytes(spec.type, spec.hidden);
    for (int i = 0; i < places; ++i) {
      const void* row = row_of(i);
      if (row && !row_has_arrived(row, bytes, as)) return i;
    }
    reduce_rows_from(w, spec, places, weighted, row_of, weight_of);
    drain_sources(w);
    for (int i = 0; as.reusable && i < places; ++i)
      if (const void* row = row_of(i)) detail::blank_row(const_cast<void*>(row), bytes, as);
    return -1;
  }

  template <class F>
  static void map_row(Warp& w, void* out, const void* src, DType type, int64_t hidden, F&& f, bool sentinel = false) {
    constexpr int64_t kBlock = 256;
    drain_sources(w);  // pending copies may still read the scratch
    float x[kBlock];
    for (int64_t at = 0; at < hidden; at += kBlock) {
      const int64_t n = std::min(kBlock, hidden - at);
      load_elements(src, type, at, n, x);
      f(x, at, n);
      store_elements(w.scratch(), type, at, n, x);
    }
    const size_t bytes = dtype_bytes(type, hidden);
    if (sentinel) return write_sentinel_row(out, w.scratch(), bytes, sentinel_sums());
    copy(w, out, w.scratch(), bytes);
  }

  static void quantize_row(Warp&, uint8_t* q, void* scales, const void* src, DType type, int64_t hidden, ScaleKind kind,
                           int group = kScaleGroup) {
    detail::quantize_row(q, scales, src, type, hidden, kind, group);
  }

  template <class F>
  static void quantize_to(Warp& w, int n, F&& f, const void* src, DType type, int64_t hidden, ScaleKind kind, int group) {
    drain_sources(w);  // pending copies may still read the scratch
    auto* const q = reinterpret_cast<uint8_t*>(w.scratch());
    std::byte* const scales = w.scratch() + (hidden + 127) / 128 * 128;
    detail::quantize_row(q, scales, src, type, hidden, kind, group);
    const auto scale_bytes = static_cast<size_t>(num_scales(hidden, group)) * (kind == ScaleKind::f32 ? 4 : 1);
    multicast_to(
        w, n, [&](int i) -> void* { return f(i).q; }, q, static_cast<size_t>(hidden));
    multicast_to(
        w, n, [&](int i) -> void* { return f(i).q ? f(i).scales : nullptr; }, scales, scale_bytes);
  }

  template <Scope>
  static uint64_t load_acquire(const uint64_t* flag, Site site) {
    return load_flag(flag, acquire_order(site));
  }

  template <Scope>
  static void store_release(Warp&, uint64_t* flag, uint64_t value, Site site) {
    store_flag(flag, value, release_order(site));
  }

  template <Scope, class F>
  static void publish_to(Warp&, int n, F&& f, Site site) {
    for (int i = 0; i < n; ++i) {
      const FlagStore store = f(i);
      if (store.flag) store_flag(store.flag, store.value, release_order(site));
    }
  }

  template <class F>
  static void publish_entry(Warp& w, int n, F&& f, Site site) {
    publish_to<Scope::system>(w, n, f, site);
  }

  template <Scope, class F>
  static int poll_from(Warp&, int n, F&& f, uint64_t value, Site site) {
    for (int i = 0; i < n; ++i) {
      if (!flag_reached(load_flag(f(i), acquire_order(site)), value)) return i;
    }
    return -1;
  }

  template <Scope>
  static uint64_t fetch_add(Warp&, uint64_t* flag, uint64_t value, Site site) {
    return add_to_flag(flag, value, acq_rel_order(site));
  }

  static uint64_t take(Warp&, uint64_t* counter, uint64_t value) {
    return add_to_flag(counter, value, std::memory_order_relaxed);
  }

  // The store is a release, at no cost here: in the C++ memory model, memory accessed without ordering could never be reused
  // for data.
  static void post(Warp&, uint64_t* flag, uint64_t value) { store_flag(flag, value, std::memory_order_release); }
  static uint64_t peek(const uint64_t* flag) { return load_flag(flag, std::memory_order_acquire); }

  static void block_sync(Warp& w) {
    if (w.warps_per_block() > 1) w.barrier()->arrive_and_wait();
  }

  template <class F>
  static uint64_t lanes_where(Warp&, int n, F&& f) {
    uint64_t mask = 0;
    for (int i = 0; i < n; ++i) mask |= static_cast<uint64_t>(f(i)) << i;
    return mask;
  }

  template <class F>
  static uint64_t lanes_union(Warp&, int n, F&& f) {
    uint64_t all = 0;
    for (int i = 0; i < n; ++i) all |= f(i);
    return all;
  }

  template <class F>
  static int64_t count_where(Warp&, int64_t n, F&& f) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) found += static_cast<int64_t>(f(i));
    return found;
  }

  template <class F>
  static Located locate(Warp&, int64_t index, int n, F&& length) {
    for (int s = 0; s < n; ++s) {
      const int64_t here = length(s);
      if (index < here) return {s, index};
      index -= here;
    }
    return {n, index};
  }
  template <class F>
  static Located locate_many(Warp& w, int64_t index, int n, F&& length) {
    return locate(w, index, n, length);
  }

  static void prefetch(Warp&, const void* src, size_t) { __builtin_prefetch(src); }

  /// A row whose contents are not read until it is copied.
  struct LaterRow {
    const void* src;
    size_t bytes;
  };
  static LaterRow fetch(Warp& w, const void* src, size_t bytes) {
    prefetch(w, src, bytes);
    return {src, bytes};
  }
  static LaterRow fetch_words(Warp& w, const void* src, size_t bytes) { return fetch(w, src, bytes); }
  template <class F>
  static void multicast_fetched(Warp& w, int n, F&& f, const LaterRow& row) {
    multicast_to(w, n, f, row.src, row.bytes);
  }

  static void count(Warp&, uint64_t* statistic, uint64_t value) { *statistic += value; }
  static void count_max(Warp&, uint64_t* statistic, uint64_t value) { *statistic = std::max(*statistic, value); }

  template <class F, class... Args>
  static bool out_of_line(Warp& w, F f, Args... args) {
    return f(w, args...);
  }
  template <class F, class... Args>
  static bool out_of_line_if_cheap(Warp& w, F f, Args... args) {
    return f(w, args...);
  }

  template <class F>
  static void for_lanes(Warp&, int64_t n, F&& f) {
    for (int64_t i = 0; i < n; ++i) f(static_cast<int>(i));
  }

  /// CLOCK_MONOTONIC: comparable across the threads and processes of one machine.
  static uint64_t now_ns() {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
  }

  static void pause(Warp&, int64_t polls) { polite_wait(polls); }
};

using Cpu = BasicCpu<false>;
using CpuDeferred = BasicCpu<true>;

static_assert(Arch<Cpu> && Arch<CpuDeferred>);

// The arch for which a mode's CPU sources are compiled. The library uses `Cpu`; the tests compile the same sources again for
// `CpuDeferred` (tests/testing).
#if !defined(SWITCHYARD_CPU_ARCH)
#define SWITCHYARD_CPU_ARCH Cpu
#endif

}  // namespace switchyard::detail

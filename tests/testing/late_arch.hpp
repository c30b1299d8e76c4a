// SPDX-License-Identifier: Apache-2.0
// CpuLate: the CPU arch with one late flag. Before an armed rank first sets a flag of the armed site, or writes a sentinel row,
// its warp sleeps. Used to test the records that other ranks make in the meantime.
#pragma once

#include <atomic>
#include <thread>

#include "arch/cpu/cpu_arch.hpp"
#include "layout/sites.hpp"

namespace switchyard::detail {

/// Shared by all objects of the arch CpuLate in the process. Use such objects on only one rank.
struct Lateness {
  std::atomic<Site> site{Site::none};  ///< the next flag of this site is late; `none`: no flag is late
  std::atomic<bool> happened{false};
  std::chrono::nanoseconds delay{};

  void arm(Site at, std::chrono::nanoseconds by) {
    happened = false;
    delay = by;
    site = at;
  }
  void before(Site now) {
    Site armed = now;
    if (now == Site::none || !site.compare_exchange_strong(armed, Site::none)) return;
    std::this_thread::sleep_for(delay);
    happened = true;
  }
};
inline Lateness lateness_of_site;

struct CpuLate : Cpu {
  template <Scope kScope>
  static void store_release(Warp& w, uint64_t* flag, uint64_t value, Site site) {
    lateness_of_site.before(site);
    Cpu::store_release<kScope>(w, flag, value, site);
  }
  template <Scope kScope, class F>
  static void publish_to(Warp& w, int n, F&& f, Site site) {
    lateness_of_site.before(site);
    Cpu::publish_to<kScope>(w, n, f, site);
  }
  template <class F>
  static void publish_entry(Warp& w, int n, F&& f, Site site) {
    publish_to<Scope::system>(w, n, f, site);
  }
  /// The only op that sets another rank's flag without a memory order.
  static void post(Warp& w, uint64_t* flag, uint64_t value) {
    lateness_of_site.before(Site::expert_count);
    Cpu::post(w, flag, value);
  }

  static void reduce_rows(Warp& w, const ReduceSpec& spec) {
    if (spec.sentinel) lateness_of_site.before(Site::returned);
    Cpu::reduce_rows(w, spec);
  }
  template <int kMaxPlaces = kMaxRanks, class Row, class Weight>
  static void reduce_rows_from(Warp& w, const ReduceSpec& given, int places, bool weighted, Row&& row_of, Weight&& weight_of) {
    if (given.sentinel) lateness_of_site.before(Site::returned);
    Cpu::reduce_rows_from<kMaxPlaces>(w, given, places, weighted, row_of, weight_of);
  }
  template <class F>
  static void multicast_sentinel(Warp& w, int n, F&& f, const void* src, size_t bytes, const Sentinel& as = sentinel_sums()) {
    lateness_of_site.before(Site::returned);
    Cpu::multicast_sentinel(w, n, f, src, bytes, as);
  }
  template <class F>
  static void map_row(Warp& w, void* out, const void* src, DType type, int64_t hidden, F&& f, bool sentinel = false) {
    if (sentinel) lateness_of_site.before(Site::returned);
    Cpu::map_row(w, out, src, type, hidden, f, sentinel);
  }
};

static_assert(Arch<CpuLate>);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Memory orders of the CPU's flag ops, per site. Normal builds use constants (acquire, release, acquire-release). Builds with
// SWITCHYARD_MUTABLE_ORDERS use a run-time table, so that a mutation suite can weaken one side of one site without a rebuild.
// The macro must be the same in every translation unit of a program.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "arch/ops.hpp"

namespace switchyard::detail {

/// The two sides of a flag: readers (acquire) and writers (release).
enum class Side : uint8_t { acquire = 0, release = 1 };

#if defined(SWITCHYARD_MUTABLE_ORDERS)

inline constexpr bool kMutableOrders = true;

/// One entry per site and side, true if weakened. The entries are relaxed atomics, because waiting warps read them while a test
/// changes them.
struct OrderTable {
  std::array<std::array<std::atomic<bool>, 2>, kMaxSites> weakened{};
};
inline OrderTable order_table;

inline std::atomic<bool>& order_entry(Site site, Side side) {
  return order_table.weakened[static_cast<size_t>(site)][static_cast<size_t>(side)];
}

/// Sets the order of one side: memory_order_relaxed weakens it, and any stronger order restores it.
inline void set_order(Site site, Side side, std::memory_order order) {
  order_entry(site, side).store(order == std::memory_order_relaxed, std::memory_order_relaxed);
}
inline void reset_orders() {
  for (auto& site : order_table.weakened) {
    for (auto& side : site) side.store(false, std::memory_order_relaxed);
  }
}

inline std::memory_order acquire_order(Site site) {
  return order_entry(site, Side::acquire).load(std::memory_order_relaxed) ? std::memory_order_relaxed
                                                                          : std::memory_order_acquire;
}
inline std::memory_order release_order(Site site) {
  return order_entry(site, Side::release).load(std::memory_order_relaxed) ? std::memory_order_relaxed
                                                                          : std::memory_order_release;
}
inline std::memory_order acq_rel_order(Site site) {
  const bool acquire = acquire_order(site) == std::memory_order_acquire;
  const bool release = release_order(site) == std::memory_order_release;
  if (acquire && release) return std::memory_order_acq_rel;
  if (acquire) return std::memory_order_acquire;
  return release ? std::memory_order_release : std::memory_order_relaxed;
}

#else

inline constexpr bool kMutableOrders = false;

constexpr std::memory_order acquire_order(Site) { return std::memory_order_acquire; }
constexpr std::memory_order release_order(Site) { return std::memory_order_release; }
constexpr std::memory_order acq_rel_order(Site) { return std::memory_order_acq_rel; }

#endif

/// Atomic access to a flag word in symmetric memory. Each branch uses a constant order: compilers implement a run-time order as
/// sequential consistency, which would hide a weakened order.
inline uint64_t load_flag(const uint64_t* flag, std::memory_order order) {
  const std::atomic_ref<uint64_t> word(*const_cast<uint64_t*>(flag));
  return order == std::memory_order_relaxed ? word.load(std::memory_order_relaxed) : word.load(std::memory_order_acquire);
}
inline void store_flag(uint64_t* flag, uint64_t value, std::memory_order order) {
  const std::atomic_ref<uint64_t> word(*flag);
  if (order == std::memory_order_relaxed) {
    word.store(value, std::memory_order_relaxed);
  } else {
    word.store(value, std::memory_order_release);
  }
}
inline uint64_t add_to_flag(uint64_t* flag, uint64_t value, std::memory_order order) {
  const std::atomic_ref<uint64_t> word(*flag);
  switch (order) {
    case std::memory_order_relaxed: return word.fetch_add(value, std::memory_order_relaxed);
    case std::memory_order_acquire: return word.fetch_add(value, std::memory_order_acquire);
    case std::memory_order_release: return word.fetch_add(value, std::memory_order_release);
    default: return word.fetch_add(value, std::memory_order_acq_rel);
  }
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>

#include "base/cpu_relax.hpp"

namespace switchyard::detail {

inline int64_t monotonic_ns() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

/// Call between two polls with the number of polls so far. The first calls execute a few pause instructions. Later calls yield,
/// for about a millisecond on a dedicated core, where a sleep would cost more than it saves. After that, each call sleeps for
/// at most 50 us (plus the kernel's timer slack). A slow yield indicates that the core ran other work; the function then sleeps
/// at once, because a fair scheduler would let dozens of polling warps catch up before the awaited warp runs again.
inline void polite_wait(int64_t polls) {
  constexpr int64_t kSpins = 16;
  constexpr int64_t kYields = 64;  // before sleeps are considered
  constexpr int64_t kMaxYields = 4000;
  constexpr int64_t kLongYieldNs = 20'000;
  if (polls < kSpins) {
    for (int i = 0; i < 4; ++i) cpu_relax();
    return;
  }
  if (polls < kYields) {
    ::sched_yield();
    return;
  }
  const int64_t before = monotonic_ns();
  ::sched_yield();
  if (polls < kMaxYields && monotonic_ns() - before < kLongYieldNs) return;
  const timespec nap{0, 50'000};
  ::nanosleep(&nap, nullptr);
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>

#include "base/cpu_relax.hpp"

namespace switchyard::detail {

/// Called between two polls of anything, with the number of polls so far: a few pause instructions, then yields, then sleeps of
/// at most 50 us.
inline void polite_wait(int64_t polls) {
  if (polls < 16) {
    for (int i = 0; i < 4; ++i) cpu_relax();
  } else if (polls < 64) {
    ::sched_yield();
  } else {
    const timespec nap{0, polls < 80 ? 5'000 : 50'000};
    ::nanosleep(&nap, nullptr);
  }
}

}  // namespace switchyard::detail

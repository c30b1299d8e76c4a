// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/random.h>
#include <unistd.h>

#include <cstdint>

namespace switchyard::detail {

/// Distinguishes this process from all others, including forked processes and processes with the same ID in another container.
struct ProcessId {
  uint64_t random = 0;
  int64_t number = 0;
  bool operator==(const ProcessId&) const = default;

  static ProcessId mine() {
    static const uint64_t drawn = [] {
      uint64_t bits = 0;
      while (::getrandom(&bits, sizeof bits, 0) != static_cast<ssize_t>(sizeof bits)) continue;
      return bits;
    }();
    return {drawn, ::getpid()};
  }
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace switchyard::detail {

/// How much memory this process may still commit, and which limit says so.
struct MemoryAvailable {
  uint64_t bytes = UINT64_MAX;
  std::string limit = "no known limit";
};

/// The least of what the machine has available and what the control groups of this process (version 1 or 2) leave of their
/// limits, reclaimable file cache counted as free. `root` is prepended to /proc and /sys; for tests. Unreadable sources are
/// skipped.
MemoryAvailable memory_available(const std::string& root = "");

/// "1.50 GiB", "256 MiB", "4096 bytes"; exact byte counts below 1 MiB.
std::string describe_bytes(uint64_t bytes);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// The machine on which a measurement runs: CPU, cores available to this process, caches, and memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace switchyard::measure {

struct Machine {
  std::string cpu_model;
  std::string kernel;  ///< version from uname
  std::string os;      ///< PRETTY_NAME of /etc/os-release
  bool virtual_machine = false;
  int logical_cpus = 0;  ///< online in the system
  int allowed_cpus = 0;  ///< in this process's affinity mask
  double cpu_quota = 0;  ///< cores granted by the control group; 0: unlimited
  int threads_per_core = 1;
  int numa_nodes = 1;
  size_t l1d_bytes = 0;         ///< per core
  size_t l2_bytes = 0;          ///< per core
  size_t llc_bytes = 0;         ///< last-level caches of the allowed cores, together
  size_t memory_bytes = 0;      ///< 0: unknown
  size_t memory_available = 0;  ///< without swapping, within all limits that the library can read; SIZE_MAX: no known limit
  std::string memory_limit;     ///< the limit that determines memory_available
  std::vector<int> cpus;        ///< allowed CPUs

  /// Number of cores that this process can keep busy: the affinity mask, capped by the quota. At least 1.
  int usable_cores() const;
};

Machine this_machine();

/// Restricts the calling thread to these CPUs; threads created by it inherit the restriction. An empty list changes nothing.
void pin_thread(const std::vector<int>& cpus);

/// CPUs for worker `index` of `count`: a contiguous, equal share of the machine's CPUs, or a single CPU if there are fewer CPUs
/// than workers.
std::vector<int> share_of_cpus(const Machine& machine, int index, int count);

/// Current time in UTC, formatted like 2026-01-31T12:00:00Z.
std::string utc_now();

}  // namespace switchyard::measure

// SPDX-License-Identifier: Apache-2.0
// Limits of this process, for the library and the command-line tool.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace switchyard::detail {

/// Memory that this process may still commit, and the limit that determines it.
struct MemoryAvailable {
  uint64_t bytes = UINT64_MAX;
  std::string limit = "no known limit";
  uint64_t machine_bytes = 0;  ///< of the whole machine; 0: unknown
};

/// Results of system calls that read no files. UINT64_MAX: no limit, or unknown.
struct MemoryAsked {
  uint64_t free = UINT64_MAX;                 ///< sysinfo(2): free and in buffers
  uint64_t machine = UINT64_MAX;              ///< sysinfo(2)
  uint64_t address_space_limit = UINT64_MAX;  ///< RLIMIT_AS
};
MemoryAsked ask_about_memory();

/// The minimum of
///   - the machine's available memory (/proc/meminfo; without it, `asked`) and, under strict overcommit, the memory that may
///     still be committed;
///   - the memory that the control groups of this process (version 1, 2 or both) and their ancestors still allow, with
///     reclaimable file cache counted as free;
///   - the address space that RLIMIT_AS still allows.
/// Unreadable sources are skipped: unknown values impose no limit. `root` is prepended to every path (for tests).
MemoryAvailable memory_available(const std::string& root, const MemoryAsked& asked = {});
/// Memory that this process can allocate now.
inline MemoryAvailable memory_available() { return memory_available("", ask_about_memory()); }

/// A folder that contains the files of a control group.
struct ControlGroup {
  std::string folder;  ///< ends in '/', without the root
  bool version1 = false;
};

/// Control groups of this process that may limit `controller` ("memory", "cpu"), each followed by those of its ancestors that
/// are mounted here. Located through /proc/self/cgroup and /proc/self/mountinfo or, if those cannot be read, at the standard
/// paths.
std::vector<ControlGroup> control_groups(const std::string& controller, const std::string& root = "");

/// Number of cores granted by the control groups; 0 if unlimited.
double cpu_quota(const std::string& root = "");

/// "1.50 GiB", "256 MiB", "4096 bytes"; exact byte counts below 1 MiB.
std::string describe_bytes(uint64_t bytes);

}  // namespace switchyard::detail

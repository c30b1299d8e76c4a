// SPDX-License-Identifier: Apache-2.0
// Runs one body per rank, as threads of this process or as forked processes, and collects all mismatches.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "harness/failures.hpp"
#include "switchyard/group.hpp"

namespace harness {

#if defined(SWITCHYARD_TEST_CUDA)
inline constexpr switchyard::Backend kBackend = switchyard::Backend::cuda;
#else
inline constexpr switchyard::Backend kBackend = switchyard::Backend::cpu;
#endif

enum class Ranks { threads, processes };

/// Workers of a rank, and whether copies are deferred.
struct Workers {
  int blocks = 1, warps = 1;
  bool deferred = false;
};
std::string to_string(const Workers& workers);

struct Fleet {
  int world = 1;
  switchyard::GroupOptions options;
  bool deferred = false;  ///< CPU: copies are performed when they are settled (testing/test_access.hpp)
  std::vector<switchyard::GroupOptions>
      per_rank;  ///< if not empty: processes only, options of each rank (deadlines and workers may differ)
};

/// Uses the suite's backend and, on GPUs, the deadlines from patience().
Fleet fleet_of(int world, const Workers& workers, size_t heap_bytes);

/// Body of a rank. An exception that escapes it counts as a failure of that rank; the other ranks are notified (Group::abort).
using RankBody = std::function<void(switchyard::Group&, Failures&)>;

/// Returns the failures of all ranks in rank order; empty means success. Blocks until all ranks have ended.
std::vector<std::string> run_threads(const Fleet& fleet, const RankBody& body);
/// Like run_threads, over Group::connect. The calling process must be single-threaded. A rank that dies, or sends nothing
/// within `limit_ms`, counts as a failure unless its bit is set in `may_die`. In a team member (rank_team.hpp), nothing is
/// forked and no rank may die.
std::vector<std::string> run_processes(const Fleet& fleet, const RankBody& body, uint64_t may_die = 0, int limit_ms = 120000);
std::vector<std::string> run_ranks(Ranks ranks, const Fleet& fleet, const RankBody& body);

/// Reads SWITCHYARD_TEST_RANKS from the environment: `threads` (default) or `processes`; any other value terminates the
/// program. The variable selects the kind of ranks in suites that support both.
Ranks ranks_of_suite();

/// How long ranks on GPUs wait for each other: SWITCHYARD_TEST_DEADLINE_S from the environment, or `default_value`. Set the
/// variable for runs under a tool that slows kernels down; run_processes then also waits at least ten times as long.
std::chrono::seconds patience(std::chrono::seconds default_value);

/// Path prefix of the folders that run_processes creates for stores and later removes.
std::string store_prefix();

/// Joins the failures, one per line; returns an empty string if there are none.
std::string joined(const std::vector<std::string>& failures);

}  // namespace harness

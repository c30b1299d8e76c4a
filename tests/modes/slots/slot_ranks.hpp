// SPDX-License-Identifier: Apache-2.0
// Ranks, maps and routes of the suites in this folder.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <vector>

#include "harness/draw.hpp"
#include "harness/everywhere.hpp"
#include "switchyard/expert_map.hpp"

namespace harness {

inline constexpr size_t kSlotHeap = size_t{4} << 20;

/// Runs the body on all ranks of a group. Returns the failures; empty: none.
inline std::string on_ranks(int world, const RankBody& body, size_t heap_bytes = kSlotHeap) {
  return joined(run_ranks(ranks_of_suite(), fleet_of(world, {}, heap_bytes), body));
}

/// home_map() with random replicas in its empty slots, of which one in `empty` stays empty.
inline switchyard::ExpertMap map_with_replicas(int experts, int world, int slots_per_rank, uint64_t seed, uint64_t empty = 4) {
  Draw draw(seed);
  switchyard::ExpertMap map = switchyard::home_map(experts, world, slots_per_rank);
  for (int32_t& e : map.expert_of_slot)
    if (e < 0 && !draw.one_in(empty)) e = static_cast<int32_t>(draw.between(0, experts - 1));
  return map;
}

/// Skewed numbers of routes, [W, E]: some are 0, the others powers of two up to 2^max_exponent.
inline std::vector<int64_t> skewed_routes(int experts, int world, uint64_t seed, int max_exponent) {
  Draw draw(seed);
  std::vector<int64_t> routes(static_cast<size_t>(world * experts));
  for (int64_t& n : routes) n = draw.one_in(5) ? 0 : int64_t{1} << draw.between(0, max_exponent);
  return routes;
}

/// Returns memory whose first access kills this process, for a rank that terminates while weights move.
inline void* deadly_memory(size_t bytes) {
  std::signal(SIGSEGV, [](int) { ::kill(::getpid(), SIGKILL); });
  return ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

}  // namespace harness

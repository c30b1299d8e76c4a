// SPDX-License-Identifier: Apache-2.0
// Worlds and workers of the suites that run twice: with ranks as threads and, with SWITCHYARD_TEST_RANKS=processes, as forked
// processes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "harness/fleet.hpp"
#include "harness/rank_memory.hpp"

namespace harness {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitizer = true;
#else
inline constexpr bool kSanitizer = false;
#endif

struct Where {
  int world;
  Workers workers;
};
inline std::ostream& operator<<(std::ostream& out, const Where& w) {
  return out << "W" << w.world << " workers " << to_string(w.workers);
}

/// Whether the environment has SWITCHYARD_TEST_WORKERS=all: every world then runs with every kind of workers (release tier).
inline bool all_workers_wanted() {
  const char* const text = std::getenv("SWITCHYARD_TEST_WORKERS");
  return text != nullptr && std::string(text) == "all";
}

/// Whether the n-th of the worlds below uses this kind of workers. Each world uses two kinds, or one in sanitizer builds. In
/// sanitizer builds with `more_at_random`, kinds 0 and 1 run with one rank, kinds 4 and 5 with two, kind 2 with three and kind
/// 3 with four; larger worlds use no kind.
constexpr bool is_chosen(int n, int kind, bool more_at_random) {
  if (!kSanitizer) return kind % 3 == n % 3;
  if (!more_at_random) return kind % 3 == n % 3 && (kind >= 3) == (n % 2 == 1);
  constexpr int kWorldOf[] = {0, 0, 2, 3, 1, 1};
  return n == kWorldOf[kind];
}

/// Worlds of 1, 2, 3, 4, 5 and 8 ranks. Workers have 2 blocks of 1, 2 or 3 warps, with immediate or deferred copies; each world
/// uses some of these six kinds, and every kind occurs. `more_at_random` means that the mode also has random calls on up to 8
/// ranks; in sanitizer builds, these replace its larger worlds, which would take half of the time. On CUDA, workers use 1, 2 or
/// 3 multiprocessors, or the value of SWITCHYARD_TEST_SMS.
inline std::vector<Where> everywhere(bool more_at_random = false) {
  std::vector<Where> all;
  int n = 0;
  for (const int world : {1, 2, 3, 4, 5, 8}) {
    if (kBackend == switchyard::Backend::cuda) {
      all.push_back({world, {2, world % 3 + 1, false}});
      continue;
    }
    for (int kind = 0; kind < 6; ++kind)
      if (is_chosen(n, kind, more_at_random) || all_workers_wanted()) all.push_back({world, {2, kind % 3 + 1, kind >= 3}});
    ++n;
  }
  return all;
}

/// Maximum number of ranks; on GPUs, at most 12 per GPU, the number that can have separate streams.
inline int many_ranks() {
#if defined(SWITCHYARD_TEST_CUDA)
  return std::min(switchyard::kMaxRanks, 12 * gpus_of_suite());
#else
  return switchyard::kMaxRanks;
#endif
}

inline std::string where_name(const testing::TestParamInfo<Where>& info) {
  return "W" + std::to_string(info.param.world) + "_" + to_string(info.param.workers);
}

}  // namespace harness

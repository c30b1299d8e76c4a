// SPDX-License-Identifier: Apache-2.0
// Worlds and workers of the suites that run twice: ranks as threads, and (SWITCHYARD_TEST_RANKS=processes) as forked processes.
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

/// SWITCHYARD_TEST_WORKERS=all in the environment: every world with every kind of workers (release tier).
inline bool all_workers_wanted() {
  const char* const text = std::getenv("SWITCHYARD_TEST_WORKERS");
  return text != nullptr && std::string(text) == "all";
}

/// Whether the n-th of the worlds below has this kind of workers. Sanitizer builds have up to four ranks, more of which are in
/// their random calls: half of the time would be for the two larger worlds.
constexpr bool is_chosen(int n, int kind) {
  if (!kSanitizer) return kind % 3 == n % 3;
  constexpr int kLast[] = {1, 5, 2, 3, -1, -1};
  return kind == kLast[n] || (n < 2 && kind == kLast[n] - 1);
}

/// 1, 2, 3, 4, 5 and 8 ranks with workers of 2 blocks of 1, 2 and 3 warps, immediate and deferred copies: some of these six
/// kinds per world, so that all six and all worlds occur. CUDA: 1, 2 or 3 multiprocessors, or what SWITCHYARD_TEST_SMS says.
inline std::vector<Where> everywhere() {
  std::vector<Where> all;
  int n = 0;
  for (const int world : {1, 2, 3, 4, 5, 8}) {
    if (kBackend == switchyard::Backend::cuda) {
      all.push_back({world, {2, world % 3 + 1, false}});
      continue;
    }
    for (int kind = 0; kind < 6; ++kind) {
      const bool deferred = kind >= 3;
      if (is_chosen(n, kind) || all_workers_wanted()) all.push_back({world, {2, kind % 3 + 1, deferred}});
    }
    ++n;
  }
  return all;
}

/// As many ranks as there may be; on GPUs as many as have streams of their own, 12 on each.
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

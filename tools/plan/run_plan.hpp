// SPDX-License-Identifier: Apache-2.0
// `switchyard plan`: predicts exchanges on a topology, for 1 to 2048 ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/verb.hpp"

namespace switchyard::tool {

extern const Verb kPlanVerb;

inline constexpr int kMaxPlannedRanks = 2048;

struct PlanOptions {
  std::string topology;
  std::vector<int64_t> ranks;         ///< empty: 1, 2, 4, ... up to the ranks of the topology
  int64_t ranks_per_host = 0;         ///< 0: as in the topology
  std::vector<std::string> variants;  ///< empty: all
  int64_t tokens = 4096;
  int64_t hidden = 7168;
  int64_t experts = 0;
  int64_t spare_slots = 0;
  int64_t topk = 0;
  std::string dtype = "bf16";
  std::string quantize = "none";
  std::string routing = "uniform";
  int64_t seed = 1;
  std::string json_path;
  std::string html_path;
  std::string commit;
};

/// \throws UsageError, std::runtime_error \returns the exit status
int run_plan(const PlanOptions& options);

}  // namespace switchyard::tool

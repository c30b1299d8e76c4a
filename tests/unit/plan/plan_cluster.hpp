// SPDX-License-Identifier: Apache-2.0
// Computes the plans of all ranks for a routing, with records copied directly, to test the planning code without heap, flags or
// threads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "harness/routings.hpp"
#include "oracle/routing.hpp"
#include "plan/plan.hpp"

namespace plan_test {

struct Case {
  harness::Routing routing;
  int world, experts, topk;
  int alignment = 1;
  int drop_percent = 0;
  bool weights = true;
  switchyard::Layout layout = switchyard::Layout::rank_major;
  int capacity_percent = 0;  ///< percentage of the rows needed; 0: unlimited
  bool wide = false;         ///< int64 ids
};
std::string to_string(const Case& c);
/// Cases with 1 to 64 ranks, uneven experts, K up to 32, all routings, drops, alignments and capacities.
std::vector<Case> all_cases();

/// Ranks have different token counts, one of which is 0.
oracle::Problem make_problem(const Case& c, uint64_t seed);
/// Returns the contents that dispatch would store in the handles of all ranks. Allocates `slack` more rows and records than
/// needed.
std::vector<std::shared_ptr<switchyard::detail::HandleData>> make_handles(const oracle::Problem& problem, bool wide,
                                                                          int64_t slack);

}  // namespace plan_test

// SPDX-License-Identifier: Apache-2.0
// The rows moved by a routing, for a benchmark's limits.
#pragma once

#include <cstdint>
#include <vector>

#include "check/scenario.hpp"
#include "measure/gpu/gpu_rank.hpp"

namespace switchyard::tool {

/// Rows of a dispatch, summed over all ranks.
struct RowCounts {
  int64_t pairs = 0;         ///< (token, rank)
  int64_t remote_pairs = 0;  ///< to a rank other than the token's
  int64_t routes = 0;        ///< routes that have an expert
};
RowCounts count_rows(const Scenario& s);

struct PlannedMoves {
  std::vector<measure::RowMoves> moves;  ///< by rank: rank-major rows, per (destination, source) in token order
  double mean_ranks = 0;                 ///< per token
  int64_t remote_pairs = 0;              ///< (token, other rank) pairs of the rank that sends the most
};
PlannedMoves plan_moves(const Scenario& s);

/// One row per route, at its position among the expert-major rows of its rank; ranks are in ascending order within each token.
struct PlannedRoutes {
  std::vector<measure::RowMoves> moves;  ///< by rank
  int64_t max_rows = 0;                  ///< maximum of a rank, padding included
};
PlannedRoutes plan_routes(const Scenario& s);

}  // namespace switchyard::tool

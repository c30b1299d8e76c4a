// SPDX-License-Identifier: Apache-2.0
// Which rows a routing moves, for the limits of a benchmark.
#pragma once

#include <cstdint>
#include <vector>

#include "check/scenario.hpp"
#include "measure/gpu/gpu_rank.hpp"

namespace switchyard::tool {

/// Rows of a dispatch, all ranks together.
struct RowCounts {
  int64_t pairs = 0;         ///< (token, rank)
  int64_t remote_pairs = 0;  ///< those of another rank than the token's
  int64_t routes = 0;        ///< that have an expert
};
RowCounts count_rows(const Scenario& s);

struct PlannedMoves {
  std::vector<measure::RowMoves> moves;  ///< of all ranks: rank-major rows, per (destination, source) in the order of tokens
  double mean_ranks = 0;                 ///< per token
  int64_t remote_pairs = 0;              ///< (token, other rank) of the rank that sends most
};
PlannedMoves plan_moves(const Scenario& s);

/// A row per route where it lies in the expert-major rows of its rank, ranks ascending in each token.
struct PlannedRoutes {
  std::vector<measure::RowMoves> moves;  ///< of all ranks
  int64_t most_rows = 0;                 ///< at any rank, padding included
};
PlannedRoutes plan_routes(const Scenario& s);

}  // namespace switchyard::tool

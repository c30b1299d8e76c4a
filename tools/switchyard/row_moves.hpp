// SPDX-License-Identifier: Apache-2.0
// Which rows a routing moves, for the limits of a benchmark.
#pragma once

#include <cstdint>
#include <vector>

#include "../../bench/cuda/gpu_rank.hpp"
#include "oracle.hpp"

namespace switchyard::tool {

struct PlannedMoves {
  std::vector<bench::RowMoves> moves;  ///< of all ranks: rank-major rows, per (destination, source) in the order of tokens
  double mean_ranks = 0;               ///< per token
  int64_t remote_pairs = 0;            ///< (token, other rank) of the rank that sends most
  int64_t all_pairs = 0, all_remote_pairs = 0, all_routes = 0;  ///< of all ranks together
};
PlannedMoves plan_moves(const Scenario& s);

/// A row per route where it lies in the expert-major rows of its rank, ranks ascending in each token.
struct PlannedRoutes {
  std::vector<bench::RowMoves> moves;  ///< of all ranks
  int64_t most_rows = 0;               ///< at any rank, padding included
};
PlannedRoutes plan_routes(const Scenario& s);

}  // namespace switchyard::tool

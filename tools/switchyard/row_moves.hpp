// SPDX-License-Identifier: Apache-2.0
// Which rows a routing moves, for the limits of a benchmark: rank-major rows, per (destination, source) in the order of tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "../../bench/cuda/gpu_rank.hpp"
#include "oracle.hpp"

namespace switchyard::tool {

struct PlannedMoves {
  std::vector<bench::RowMoves> moves;  ///< of all ranks
  double mean_ranks = 0;               ///< per token
  int64_t remote_pairs = 0;            ///< (token, other rank) of the rank that sends most
};
PlannedMoves plan_moves(const Scenario& s);

}  // namespace switchyard::tool

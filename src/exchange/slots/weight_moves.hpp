// SPDX-License-Identifier: Apache-2.0
// Plan of the copies from the weights of one map to those of another.
#pragma once

#include <vector>

#include "switchyard/expert_map.hpp"

namespace switchyard::detail {

/// Copy to `slot` from one of the slots that `source_rank` sends.
struct WeightMove {
  int slot;
  int source_rank;
  int sent;  ///< index in WeightMoves::sent_by[source_rank]
};

struct WeightMoves {
  std::vector<std::vector<int>> sent_by;         ///< [W] source slots of each rank, each once
  std::vector<std::vector<WeightMove>> of_rank;  ///< [W] destination slots of each rank, ascending
  size_t max_sent = 0;                           ///< maximum number of source slots of a rank
};

/// The source of a slot is the rank's own slot of the expert or, without one, a slot of the rank that has been chosen for the
/// fewest slots of other ranks so far; of equal ranks, the lowest.
/// \pre both maps are valid and have the same sizes
WeightMoves plan_moves(const ExpertMap& from, const ExpertMap& to);

}  // namespace switchyard::detail

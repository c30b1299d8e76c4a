// SPDX-License-Identifier: Apache-2.0
// The copies that turn the weights of one map into those of another.
#pragma once

#include <vector>

#include "switchyard/expert_map.hpp"

namespace switchyard::detail {

/// Fills a slot from the n-th of the slots that a rank sends.
struct WeightMove {
  int slot;
  int source_rank;
  int sent;  ///< index in WeightMoves::sent_by[source_rank]
};

struct WeightMoves {
  std::vector<std::vector<int>> sent_by;         ///< [W] the slots that each rank sends, each once
  std::vector<std::vector<WeightMove>> of_rank;  ///< [W] the slots that each rank fills, in ascending order
  size_t max_sent = 0;                           ///< of a rank
};

/// A slot is filled from the rank's own slot of the expert or, if there is none, from that of the rank that has been chosen for
/// the fewest slots so far, the lowest one if there are several. \pre both maps are valid and have the same sizes
WeightMoves plan_moves(const ExpertMap& from, const ExpertMap& to);

}  // namespace switchyard::detail

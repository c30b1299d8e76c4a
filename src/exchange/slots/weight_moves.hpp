// SPDX-License-Identifier: Apache-2.0
// Plan of the copies from the weights of one map to those of another.
#pragma once

#include <cstddef>
#include <vector>

#include "bootstrap/host_map.hpp"
#include "switchyard/expert_map.hpp"

namespace switchyard::detail {

/// Copy to `slot`, through the staging memory of a rank.
struct WeightMove {
  int slot;
  int source_rank, source_slot;
  int staged_rank;   ///< on the host of the destination: the source rank or, if it is on another host, its proxy
  size_t staged_at;  ///< index of the weights in that rank's staging memory
};

/// The slots that a rank sends to the ranks of one host, each once. They are staged in order.
struct WeightParcel {
  int source_rank, host;
  int staged_rank;   ///< as in WeightMove
  size_t staged_at;  ///< of the first slot
  std::vector<int> slots;

  bool crosses() const { return staged_rank != source_rank; }
};

struct WeightMoves {
  std::vector<std::vector<WeightMove>> of_rank;  ///< [W] destination slots of each rank, ascending
  std::vector<WeightParcel> parcels;             ///< by source rank, then by host
  size_t max_staged = 0;                         ///< maximum number of slots in the staging memory of a rank
  size_t max_crossing = 0;                       ///< maximum number of slots that a rank sends to and receives from other hosts
};

/// The source of a slot is, in order of preference: the rank's own slot of the expert, a rank on the same host, the rank that
/// already sends the expert to this host, or a rank on another host. Among several ranks, the source is the one chosen for the
/// fewest slots of other ranks so far; among equal ranks, the lowest.
/// \pre both maps are valid, have the same sizes, and are for the ranks of `hosts`
WeightMoves plan_moves(const ExpertMap& from, const ExpertMap& to, const HostMap& hosts);

}  // namespace switchyard::detail

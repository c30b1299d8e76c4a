// SPDX-License-Identifier: Apache-2.0
// Division of the routes of replicated experts over their slots. Integer arithmetic only, so all ranks compute the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/expert_map.hpp"

namespace switchyard::detail {

inline size_t slot_idx(int64_t i) { return static_cast<size_t>(i); }

/// True if a slot of `rank` holds expert `e`.
inline bool holds(const ExpertMap& map, int rank, int32_t e) {
  const auto begin = map.expert_of_slot.begin() + static_cast<std::ptrdiff_t>(rank) * map.slots_per_rank;
  return std::find(begin, begin + map.slots_per_rank, e) != begin + map.slots_per_rank;
}

/// Loads of slots and ranks for given routes per expert. Starts with all routes of an expert in its first slot, then levels the
/// routes of one replicated expert after the other, given the loads by all others, until nothing changes; the sum of the
/// squares of the ranks' loads decreases with every step. The map must be valid, the routes at most 2^40 each.
class ExpertDivision {
 public:
  /// `max_passes` over the replicated experts.
  ExpertDivision(const ExpertMap& map, std::span<const int64_t> routes_per_expert, int max_passes = 256);
  const SlotLoads& loads() const { return loads_; }
  /// The used slots of expert `e`: at most one per rank, in ascending order.
  const std::vector<int>& slots_of(int e) const { return slots_[slot_idx(e)]; }

 private:
  void add(int slot, int64_t routes);
  /// Levels the routes of expert `e`. Returns whether any share changed by more than the rounding.
  bool level(int e, int64_t routes);

  int slots_per_rank_;
  std::vector<std::vector<int>> slots_;
  SlotLoads loads_;
  // Scratch of level(), per slot of an expert.
  std::vector<int64_t> base_, share_;
  std::vector<int> order_;
};

}  // namespace switchyard::detail

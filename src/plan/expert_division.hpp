// SPDX-License-Identifier: Apache-2.0
// Division of the routes of replicated experts among their slots. Uses only integer arithmetic, so that all ranks compute the
// same result.
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

/// Slot and rank loads for the given routes per expert. Assigns all routes of an expert to its first slot, then balances one
/// replicated expert at a time, with the shares of all others fixed, in a few passes. Finally moves routes from the busiest
/// rank to the least loaded rank that a chain of experts connects with it, until no chain reduces the busiest rank's load: the
/// maximum rank load is then the lowest possible. Each step reduces the sum of squared rank loads. \pre the map is valid, and
/// each number of routes is at most 2^40
class ExpertDivision {
 public:
  enum class Effort { rough, full };  ///< rough: without the final moves
  ExpertDivision(const ExpertMap& map, std::span<const int64_t> routes_per_expert, Effort effort = Effort::full);
  const SlotLoads& loads() const { return loads_; }
  /// The slots of expert `e` in use: at most one per rank, in ascending order.
  const std::vector<int>& slots_of(int e) const { return slots_[slot_idx(e)]; }

 private:
  void add(int slot, int64_t routes);
  /// Balances the routes of expert `e`. Returns true if a share changed by more than rounding.
  bool level(int e, int64_t routes);
  /// Moves routes from the busiest rank along one chain. Returns false if no chain reduces its load.
  bool unload_busiest(const ExpertMap& map);

  int slots_per_rank_;
  std::vector<std::vector<int>> slots_;
  SlotLoads loads_;
  // Scratch memory of level(), per slot of an expert.
  std::vector<int64_t> base_, share_;
  std::vector<int> order_;
};

/// The division of the routes of all ranks, [W, E]. \throws Error(invalid_argument) for an invalid map or routes
ExpertDivision divide_all(const ExpertMap& map, std::span<const int64_t> routes);

/// The runs of rank `source` in that division; see divide_source(). \pre the rank exists
SlotRuns runs_of_source(const ExpertDivision& division, const ExpertMap& map, std::span<const int64_t> routes, int source);

/// Takes the slots of one rank's routes, in routing order. `runs` must outlive this object.
class SlotSequence {
 public:
  explicit SlotSequence(const SlotRuns& runs)
      : runs_(runs), experts_(runs.begin.empty() ? 0 : runs.begin.size() - 1), run_(runs.begin), used_(experts_, 0) {}
  size_t num_experts() const { return experts_; }
  /// The slot of the next route to expert `e`; -1 after the last one. \pre e < num_experts()
  int32_t next(size_t e) {
    while (run_[e] < runs_.begin[e + 1] && used_[e] == runs_.runs[run_[e]].count) {
      ++run_[e];
      used_[e] = 0;
    }
    if (run_[e] == runs_.begin[e + 1]) return -1;
    ++used_[e];
    return runs_.runs[run_[e]].slot;
  }

 private:
  const SlotRuns& runs_;
  size_t experts_;
  std::vector<size_t> run_;    ///< [E + 1], the last unused
  std::vector<int64_t> used_;  ///< [E] routes of that run
};

/// Throws Error(invalid_argument) for arguments that plan_step() refuses.
void check_step(double expert_bytes, const StepOptions& options);

}  // namespace switchyard::detail

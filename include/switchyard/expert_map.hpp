// SPDX-License-Identifier: Apache-2.0
/// \file
/// Replicated experts: which ranks hold the weights of which experts, how the routes of an expert are divided over its
/// replicas, and a planner that chooses the replicas from past loads. All functions are deterministic: equal arguments give
/// equal results on every rank. They run on the host, need no group and may be called from any thread.
///
/// The slots of a map are numbered like experts: slot p is expert p of an exchange with num_experts = num_slots() whose ranks
/// hold slots_per_rank consecutive experts each. A caller replaces each id of a routing by a slot of that expert
/// (divide_source, replace_by_slots) and loads the weights by slot; combine then sums the same rows in the same order as
/// without replicas. docs/how_to/replicate_experts.md shows it.
///
/// Notation: W ranks, E experts, C slots per rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace switchyard {

/// The expert of every slot; slot p is on rank p / slots_per_rank.
struct ExpertMap {
  int num_experts = 0;
  int world = 0;                        ///< at most 64
  int slots_per_rank = 0;               ///< equal on all ranks
  std::vector<int32_t> expert_of_slot;  ///< [W * C]; -1: an empty slot

  int num_slots() const noexcept { return world * slots_per_rank; }
  bool operator==(const ExpertMap&) const = default;
};

/// \throws Error(invalid_argument) if a size is out of range, a slot holds no expert of the map, or an expert has no slot.
/// Several slots of a rank may hold the same expert; only the first of them is used.
void check_expert_map(const ExpertMap& map);

/// The map without replicas: every rank holds the experts that first_expert() (normal.hpp) assigns to it, in order, followed by
/// empty slots. \throws Error(invalid_argument) if the slots do not suffice
ExpertMap home_map(int num_experts, int world, int slots_per_rank);

/// Numbers of routes.
struct SlotLoads {
  std::vector<int64_t> of_slot;  ///< [W * C]
  std::vector<int64_t> of_rank;  ///< [W]
  /// Of the busiest rank.
  int64_t max() const noexcept;
};

/// Divides the routes of each expert over its slots such that the loads of the ranks are nearly as equal as possible. Levels
/// one expert after the other, given the loads by all others, until nothing changes, at most 256 times. `routes_per_expert`:
/// [E], all ranks together, at most 2^40 each. \throws Error(invalid_argument)
SlotLoads divide_routes(const ExpertMap& map, std::span<const int64_t> routes_per_expert);

/// The slots of one rank's routes: the routes to expert e, in the order of the routing (token, then k), take the slots of
/// runs[begin[e]] to runs[begin[e + 1] - 1], each for `count` routes.
struct SlotRuns {
  struct Run {
    int32_t slot;
    int64_t count;
  };
  std::vector<size_t> begin;  ///< [E + 1]
  std::vector<Run> runs;
};

/// The routes of rank `source` in the division of divide_routes(): a rank's routes use its own slots first; the others fill the
/// remaining shares in the order of ranks and slots, so the routes of a rank to an expert form few runs. `routes`: [W, E]
/// routes from each rank to each expert. \throws Error(invalid_argument)
SlotRuns divide_source(const ExpertMap& map, std::span<const int64_t> routes, int source);

/// Replaces the ids of a rank's routing, in its order, by the slots of its runs; -1 stays. \throws Error(invalid_argument) if
/// an id is neither -1 nor an expert, or an expert has more routes than its runs; `ids` is then partly replaced
void replace_by_slots(std::span<int32_t> ids, const SlotRuns& runs);

/// Chooses replicas for experts with these loads, such as counts of past calls. The result has the sizes of `current` and may
/// use all slots. Of three maps, which move more and more weights, returns the first whose busiest rank has at most `tolerance`
/// times the mean load more than that of the best:
///
/// - `current`,
/// - one that keeps a copy of every expert where it is, adds replicas and exchanges experts of the busiest rank,
/// - one that places all experts anew, with the most replicas for the experts with the highest load per replica.
///
/// `routes_per_expert`: [E], at most 2^40 each. \throws Error(invalid_argument)
ExpertMap plan_experts(std::span<const int64_t> routes_per_expert, const ExpertMap& current, double tolerance = 0.02);

/// Number of slots of `to` whose expert the rank does not hold in `from`: the sets of weights to move.
/// \throws Error(invalid_argument) if the sizes of the maps differ
int count_moved(const ExpertMap& from, const ExpertMap& to);

}  // namespace switchyard

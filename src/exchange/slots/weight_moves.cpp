// SPDX-License-Identifier: Apache-2.0
#include "exchange/slots/weight_moves.hpp"

#include <algorithm>

#include "plan/expert_division.hpp"

namespace switchyard::detail {

namespace {

/// The first slot of each rank that holds the expert, or -1: [E][W].
std::vector<std::vector<int>> find_holders(const ExpertMap& map) {
  std::vector<std::vector<int>> holders(slot_idx(map.num_experts), std::vector<int>(slot_idx(map.world), -1));
  for (int p = map.num_slots() - 1; p >= 0; --p)
    if (const int32_t e = map.expert_of_slot[slot_idx(p)]; e >= 0) holders[slot_idx(e)][slot_idx(p / map.slots_per_rank)] = p;
  return holders;
}

int choose_source(const std::vector<int>& slot_of_rank, int rank, const std::vector<int>& times_chosen) {
  if (slot_of_rank[slot_idx(rank)] >= 0) return rank;
  int source = -1;
  for (int r = 0; r < static_cast<int>(slot_of_rank.size()); ++r)
    if (slot_of_rank[slot_idx(r)] >= 0 && (source < 0 || times_chosen[slot_idx(r)] < times_chosen[slot_idx(source)]))
      source = r;
  return source;
}

}  // namespace

WeightMoves plan_moves(const ExpertMap& from, const ExpertMap& to) {
  const std::vector<std::vector<int>> holders = find_holders(from);
  WeightMoves moves;
  moves.sent_by.resize(slot_idx(from.world));
  moves.of_rank.resize(slot_idx(from.world));
  std::vector<int> times_chosen(slot_idx(from.world), 0);  // as a source for another rank
  for (int p = 0; p < to.num_slots(); ++p) {
    const int32_t e = to.expert_of_slot[slot_idx(p)];
    if (e < 0 || from.expert_of_slot[slot_idx(p)] == e) continue;
    const int rank = p / to.slots_per_rank, source = choose_source(holders[slot_idx(e)], rank, times_chosen);
    if (source != rank) ++times_chosen[slot_idx(source)];
    std::vector<int>& sent = moves.sent_by[slot_idx(source)];
    const int slot = holders[slot_idx(e)][slot_idx(source)];
    const auto at = std::find(sent.begin(), sent.end(), slot);
    moves.of_rank[slot_idx(rank)].push_back({p, source, static_cast<int>(at - sent.begin())});
    if (at == sent.end()) sent.push_back(slot);
    moves.max_sent = std::max(moves.max_sent, sent.size());
  }
  return moves;
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#include "plan/expert_division.hpp"

#include <numeric>

namespace switchyard::detail {

ExpertDivision::ExpertDivision(const ExpertMap& map, std::span<const int64_t> routes_per_expert, Effort effort)
    : slots_per_rank_(map.slots_per_rank), slots_(slot_idx(map.num_experts)) {
  for (int p = 0; p < map.num_slots(); ++p) {
    const int32_t e = map.expert_of_slot[slot_idx(p)];
    if (e < 0) continue;
    std::vector<int>& slots = slots_[slot_idx(e)];
    if (slots.empty() || slots.back() / slots_per_rank_ != p / slots_per_rank_) slots.push_back(p);
  }
  loads_.of_slot.assign(slot_idx(map.num_slots()), 0);
  loads_.of_rank.assign(slot_idx(map.world), 0);
  std::vector<int> replicated;
  for (int e = 0; e < map.num_experts; ++e) {
    add(slots_of(e).front(), routes_per_expert[slot_idx(e)]);
    if (slots_of(e).size() > 1 && routes_per_expert[slot_idx(e)] > 0) replicated.push_back(e);
  }
  constexpr int kPasses = 16;
  bool changed = true;
  for (int pass = 0; changed && pass < kPasses; ++pass) {
    changed = false;
    for (const int e : replicated) changed = level(e, routes_per_expert[slot_idx(e)]) || changed;
  }
  while (effort == Effort::full && unload_busiest(map)) {
  }
}

void ExpertDivision::add(int slot, int64_t routes) {
  loads_.of_slot[slot_idx(slot)] += routes;
  loads_.of_rank[slot_idx(slot / slots_per_rank_)] += routes;
}

bool ExpertDivision::level(int e, int64_t routes) {
  const std::vector<int>& slots = slots_of(e);
  const size_t count = slots.size();
  base_.resize(count);
  share_.assign(count, 0);
  order_.resize(count);
  for (size_t i = 0; i < count; ++i)
    base_[i] = loads_.of_rank[slot_idx(slots[i] / slots_per_rank_)] - loads_.of_slot[slot_idx(slots[i])];
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [&](int a, int b) {
    return base_[slot_idx(a)] != base_[slot_idx(b)] ? base_[slot_idx(a)] < base_[slot_idx(b)] : a < b;
  });
  // The ranks with the lowest loads are filled to a common height, as far as the routes suffice.
  int64_t sum = routes, used = 0;
  for (const int i : order_) {
    if (used > 0 && base_[slot_idx(i)] * used >= sum) break;
    sum += base_[slot_idx(i)];
    ++used;
  }
  for (int64_t i = 0; i < used; ++i) {
    const size_t at = slot_idx(order_[slot_idx(i)]);
    share_[at] = sum / used - base_[at] + (i < sum % used ? 1 : 0);
  }
  bool changed = false;
  for (size_t i = 0; i < count; ++i) {
    const int64_t by = share_[i] - loads_.of_slot[slot_idx(slots[i])];
    changed = changed || by > 1 || by < -1;
    add(slots[i], by);
  }
  return changed;
}

bool ExpertDivision::unload_busiest(const ExpertMap& map) {
  struct Move {
    int from = -1, to = -1;  ///< slots of an expert; `to` is on the reached rank
  };
  const std::vector<int64_t>& loads = loads_.of_rank;
  const auto busiest = static_cast<int>(std::max_element(loads.begin(), loads.end()) - loads.begin());
  std::vector<Move> reached_by(loads.size());
  std::vector<int> reached{busiest};
  std::vector<char> is_reached(loads.size(), 0);
  is_reached[slot_idx(busiest)] = 1;
  int target = busiest;
  for (size_t i = 0; i < reached.size(); ++i) {
    if (loads[slot_idx(reached[i])] < loads[slot_idx(target)]) target = reached[i];
    for (int p = reached[i] * slots_per_rank_; p < (reached[i] + 1) * slots_per_rank_; ++p) {
      if (loads_.of_slot[slot_idx(p)] == 0) continue;
      for (const int q : slots_of(map.expert_of_slot[slot_idx(p)])) {
        const int rank = q / slots_per_rank_;
        if (is_reached[slot_idx(rank)] != 0) continue;
        is_reached[slot_idx(rank)] = 1;
        reached_by[slot_idx(rank)] = {p, q};
        reached.push_back(rank);
      }
    }
  }
  int64_t routes = (loads[slot_idx(busiest)] - loads[slot_idx(target)]) / 2;
  for (int r = target; r != busiest; r = reached_by[slot_idx(r)].from / slots_per_rank_)
    routes = std::min(routes, loads_.of_slot[slot_idx(reached_by[slot_idx(r)].from)]);
  if (routes == 0) return false;
  for (int r = target; r != busiest;) {
    const Move move = reached_by[slot_idx(r)];
    add(move.from, -routes);
    add(move.to, routes);
    r = move.from / slots_per_rank_;
  }
  return true;
}

}  // namespace switchyard::detail

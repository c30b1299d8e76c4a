// SPDX-License-Identifier: Apache-2.0
#include "exchange/slots/weight_moves.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "plan/expert_division.hpp"

namespace switchyard::detail {

namespace {

class MovePlanner {
 public:
  MovePlanner(const ExpertMap& from, const HostMap& hosts)
      : hosts_(hosts),
        holders_(slot_idx(from.num_experts), std::vector<int>(slot_idx(from.world), -1)),
        times_chosen_(slot_idx(from.world), 0) {
    for (int p = from.num_slots() - 1; p >= 0; --p)
      if (const int32_t e = from.expert_of_slot[slot_idx(p)]; e >= 0)
        holders_[slot_idx(e)][slot_idx(p / from.slots_per_rank)] = p;
  }

  /// Adds a copy of expert `e` to slot `slot` of `rank`.
  void add(int32_t e, int rank, int slot) {
    const int source = choose_source(e, rank), host = hosts_.host_of(rank);
    if (source != rank) ++times_chosen_[slot_idx(source)];
    if (!hosts_.together(source, rank)) sender_[{host, e}] = source;
    const int source_slot = holders_[slot_idx(e)][slot_idx(source)];
    std::vector<int>& sent = sent_[{source, host}];
    if (std::find(sent.begin(), sent.end(), source_slot) == sent.end()) sent.push_back(source_slot);
    copies_.push_back({slot, source, source_slot, rank, 0});
  }

  WeightMoves finish(int slots_per_rank) {
    WeightMoves moves;
    const size_t world = times_chosen_.size();
    std::vector<size_t> staged(world, 0), crossing(world, 0);
    for (auto& [key, slots] : sent_) {
      const auto [source, host] = key;
      const int at_rank = hosts_.proxy(source, host);
      moves.parcels.push_back({source, host, at_rank, staged[slot_idx(at_rank)], std::move(slots)});
      const WeightParcel& parcel = moves.parcels.back();
      staged[slot_idx(at_rank)] += parcel.slots.size();
      if (!parcel.crosses()) continue;
      for (const int r : {source, at_rank}) crossing[slot_idx(r)] += parcel.slots.size();
    }
    moves.max_staged = *std::max_element(staged.begin(), staged.end());
    moves.max_crossing = *std::max_element(crossing.begin(), crossing.end());
    moves.of_rank.resize(world);
    for (WeightMove copy : copies_) {
      const int rank = copy.slot / slots_per_rank, host = hosts_.host_of(rank);
      const auto parcel = std::find_if(moves.parcels.begin(), moves.parcels.end(), [&](const WeightParcel& each) {
        return each.source_rank == copy.source_rank && each.host == host;
      });
      const auto at = std::find(parcel->slots.begin(), parcel->slots.end(), copy.source_slot) - parcel->slots.begin();
      copy.staged_rank = parcel->staged_rank;
      copy.staged_at = parcel->staged_at + static_cast<size_t>(at);
      moves.of_rank[slot_idx(rank)].push_back(copy);
    }
    return moves;
  }

 private:
  int choose_source(int32_t e, int rank) const {
    const std::vector<int>& slot_of_rank = holders_[slot_idx(e)];
    if (slot_of_rank[slot_idx(rank)] >= 0) return rank;
    const auto least_chosen = [&](const auto& allowed) {
      int source = -1;
      for (int r = 0; r < hosts_.world(); ++r)
        if (slot_of_rank[slot_idx(r)] >= 0 && allowed(r) &&
            (source < 0 || times_chosen_[slot_idx(r)] < times_chosen_[slot_idx(source)]))
          source = r;
      return source;
    };
    if (const int near = least_chosen([&](int r) { return hosts_.together(r, rank); }); near >= 0) return near;
    if (const auto sender = sender_.find({hosts_.host_of(rank), e}); sender != sender_.end()) return sender->second;
    return least_chosen([](int) { return true; });
  }

  const HostMap& hosts_;
  std::vector<std::vector<int>> holders_;                 ///< [E][W] first slot of each rank that holds the expert, or -1
  std::vector<int> times_chosen_;                         ///< [W] as a source for another rank
  std::map<std::pair<int, int32_t>, int> sender_;         ///< host, expert -> rank of another host that sends it
  std::map<std::pair<int, int>, std::vector<int>> sent_;  ///< source rank, host -> slots
  std::vector<WeightMove> copies_;
};

}  // namespace

WeightMoves plan_moves(const ExpertMap& from, const ExpertMap& to, const HostMap& hosts) {
  MovePlanner planner(from, hosts);
  for (int p = 0; p < to.num_slots(); ++p)
    if (const int32_t e = to.expert_of_slot[slot_idx(p)]; e >= 0 && from.expert_of_slot[slot_idx(p)] != e)
      planner.add(e, p / to.slots_per_rank, p);
  return planner.finish(to.slots_per_rank);
}

}  // namespace switchyard::detail

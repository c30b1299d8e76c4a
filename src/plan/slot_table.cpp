// SPDX-License-Identifier: Apache-2.0
#include "plan/slot_table.hpp"

#include <algorithm>
#include <bit>

#include "plan/expert_division.hpp"

namespace switchyard::detail {

namespace {

using Runs = std::vector<SlotRuns::Run>;

/// The runs of an expert to which the rank has no routes. `loads`: those of all ranks' routes.
Runs runs_without_routes(const ExpertMap& map, const SlotLoads& loads, int expert, int source) {
  Runs runs;
  int previous = -1;
  for (int p = 0; p < map.num_slots(); ++p) {
    const int rank = p / map.slots_per_rank;
    if (map.expert_of_slot[slot_idx(p)] != expert || rank == previous) continue;
    if (rank == source) return {{p, 1}};
    runs.push_back({p, loads.of_slot[slot_idx(p)]});
    previous = rank;
  }
  if (std::all_of(runs.begin(), runs.end(), [](const SlotRuns::Run& run) { return run.count == 0; }))
    for (SlotRuns::Run& run : runs) run.count = 1;
  return runs;
}

/// floor(part / whole * 2^32). Both are reduced to 31 bits first. \pre 0 <= part <= whole, whole > 0
uint64_t fraction_of(int64_t part, int64_t whole) {
  const int shift = std::max(0, static_cast<int>(std::bit_width(static_cast<uint64_t>(whole))) - 31);
  return (static_cast<uint64_t>(part >> shift) << 32) / static_cast<uint64_t>(whole >> shift);
}

}  // namespace

std::vector<uint32_t> make_slot_table(const ExpertMap& map, std::span<const int64_t> routes, int source) {
  const size_t experts = slot_idx(map.num_experts), slots = slot_idx(map.num_slots());
  const SlotRuns division = divide_source(map, routes, source);
  std::vector<int64_t> sums(experts);
  for (size_t i = 0; i < routes.size(); ++i) sums[i % experts] += routes[i];
  const SlotLoads loads = divide_routes(map, sums);

  std::vector<uint32_t> words(slot_idx(SlotTable::num_words(map.num_experts, map.num_slots())));
  uint32_t* const last = words.data() + experts + 1;
  uint32_t used = 0;
  for (size_t e = 0; e < experts; ++e) {
    words[e] = used;
    Runs runs(division.runs.begin() + static_cast<std::ptrdiff_t>(division.begin[e]),
              division.runs.begin() + static_cast<std::ptrdiff_t>(division.begin[e + 1]));
    if (runs.empty()) runs = runs_without_routes(map, loads, static_cast<int>(e), source);
    int64_t whole = 0, part = 0;
    for (const SlotRuns::Run& run : runs) whole += run.count;
    for (const SlotRuns::Run& run : runs) {
      const uint64_t from = fraction_of(part, whole), to = fraction_of(part += run.count, whole);
      if (from == to) continue;
      last[used] = static_cast<uint32_t>(to - 1);
      last[slots + used++] = static_cast<uint32_t>(run.slot);
    }
  }
  words[experts] = used;
  return words;
}

}  // namespace switchyard::detail

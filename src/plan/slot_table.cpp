// SPDX-License-Identifier: Apache-2.0
#include "plan/slot_table.hpp"

#include <algorithm>
#include <bit>

#include "plan/expert_division.hpp"

namespace switchyard::detail {

namespace {

using Runs = std::vector<SlotRuns::Run>;

/// The runs of an expert to which the rank has no routes.
Runs runs_without_routes(const ExpertDivision& division, int slots_per_rank, int expert, int source) {
  Runs runs;
  for (const int p : division.slots_of(expert)) {
    if (p / slots_per_rank == source) return {{p, 1}};
    runs.push_back({p, division.loads().of_slot[slot_idx(p)]});
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

std::vector<uint32_t> make_slot_table(const ExpertMap& map, std::span<const int64_t> routes, int source, uint32_t version) {
  const size_t experts = slot_idx(map.num_experts), slots = slot_idx(map.num_slots());
  const ExpertDivision division = divide_all(map, routes);
  const SlotRuns all = runs_of_source(division, map, routes, source);

  std::vector<uint32_t> words(slot_idx(SlotTable::num_words(map.num_experts, map.num_slots())));
  uint32_t* const last = words.data() + experts + 1;
  uint32_t used = 0;
  for (size_t e = 0; e < experts; ++e) {
    words[e] = used;
    Runs runs(all.runs.begin() + static_cast<std::ptrdiff_t>(all.begin[e]),
              all.runs.begin() + static_cast<std::ptrdiff_t>(all.begin[e + 1]));
    if (runs.empty()) runs = runs_without_routes(division, map.slots_per_rank, static_cast<int>(e), source);
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
  words.back() = version;
  return words;
}

}  // namespace switchyard::detail

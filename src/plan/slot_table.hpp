// SPDX-License-Identifier: Apache-2.0
// Table of the slots for one rank's routes, for kernels and the CPU. A slot is a pure function of the table, the expert and the
// token's index: a lookup requires neither communication nor the number of tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "arch/reverse_bits.hpp"
#include "base/invalid_routes.hpp"
#include "base/macros.hpp"
#include "switchyard/expert_map.hpp"

namespace switchyard::detail {

/// Number of consecutive tokens with the same position in the division (division_point).
inline constexpr int64_t kTokensPerRun = 8;

/// The position of a rank's token in the division of every expert, as a fraction of 2^32: the bit-reversed sum of the token's
/// run number and the rank. The positions of any n consecutive runs are spread evenly, so any range of tokens is divided in
/// nearly the same proportions. In calls of few tokens, the positions differ by rank. All routes of a token have the same
/// position, so its replicas tend to be on one rank.
SWITCHYARD_FN inline uint32_t division_point(int64_t token, int rank) {
  return reverse_bits(static_cast<uint32_t>(token / kTokensPerRun + rank));
}

/// A view of the words made by make_slot_table().
struct SlotTable {
  const uint32_t* words = nullptr;  ///< begin[E + 1], last[S], slot[S], version
  int num_experts = 0;
  int num_slots = 0;
  int rank = 0;  ///< the rank of the table's routes

  static constexpr int64_t num_words(int num_experts, int num_slots) {
    return int64_t{num_experts} + 1 + 2 * int64_t{num_slots} + 1;
  }

  /// Returns the slot of expert `id` for token `token`; -1 for the id -1; refused_slot(id) for any other id that is not an
  /// expert.
  SWITCHYARD_FN int64_t operator()(int64_t id, int64_t token) const {
    if (id < 0 || id >= num_experts) return refused_slot(id);
    const uint32_t* const last = words + num_experts + 1;
    const uint32_t point = division_point(token, rank);
    uint32_t i = words[id], slot = last[num_slots + i];    // loaded together with last[i]
    while (last[i] < point) slot = last[num_slots + ++i];  // the last entry of an expert is 2^32 - 1
    return slot;
  }
  /// Returns the table_version() of the map.
  SWITCHYARD_FN uint32_t version() const { return words[num_words(num_experts, num_slots) - 1]; }
};

/// Returns the table of rank `source` for the division of `routes`, [W, E], by divide_source(). For an expert to which `source`
/// has no routes, the table contains the rank's own slot or, without one, the slots of other ranks in proportion to the routes
/// of all ranks.
/// \pre the arguments are valid (divide_source)
std::vector<uint32_t> make_slot_table(const ExpertMap& map, std::span<const int64_t> routes, int source, uint32_t version);

}  // namespace switchyard::detail

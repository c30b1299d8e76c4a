// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/macros.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

/// Slots of ids that are not experts of a map. No exchange accepts these slots, and errors name the id. An id in
/// [1, kRefusedSlots) has the slot kFirstRefusedSlot + id (expert 0 always exists). Every other id, which no exchange accepts
/// either, is its own slot.
inline constexpr int64_t kFirstRefusedSlot = INT32_MIN, kRefusedSlots = int64_t{1} << 30;
SWITCHYARD_FN inline int64_t refused_slot(int64_t id) { return id >= 0 && id < kRefusedSlots ? kFirstRefusedSlot + id : id; }
SWITCHYARD_FN inline bool is_refused_slot(int64_t slot) {
  return slot > kFirstRefusedSlot && slot < kFirstRefusedSlot + kRefusedSlots;
}

/// Routes of one rank's call whose ids are neither -1 nor an expert.
struct InvalidRoutes {
  int64_t count = 0;
  int64_t first = -1;  ///< the first invalid route, token * K + k
  int64_t id = 0;      ///< its id

  void add(int64_t route, int64_t route_id) {
    if (count++ == 0) first = route, id = route_id;
  }
};

/// Finds invalid ids among those of the first `tokens` tokens; the ids are in host memory. Makes one comparison per id if none
/// is invalid.
inline InvalidRoutes find_invalid_routes(const ExpertIds& ids, int64_t tokens, int num_experts) {
  InvalidRoutes found;
  const auto experts = static_cast<uint64_t>(num_experts);
  const auto look = [&](const auto* all) {
    int64_t invalid = 0;  // -1 + 1 wraps to 0
    for (int64_t f = 0; f < tokens * ids.topk; ++f) invalid += static_cast<uint64_t>(int64_t{all[f]}) + 1 > experts ? 1 : 0;
    for (int64_t f = 0; found.count < invalid; ++f)
      if (static_cast<uint64_t>(int64_t{all[f]}) + 1 > experts) found.add(f, all[f]);
  };
  if (ids.is_int64)
    look(static_cast<const int64_t*>(ids.data));
  else
    look(static_cast<const int32_t*>(ids.data));
  return found;
}

}  // namespace switchyard::detail

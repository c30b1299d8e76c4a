// SPDX-License-Identifier: Apache-2.0
#include "plan/views.hpp"

namespace switchyard::detail {

StridedSlots make_strided(const HandleData& h) {
  const int world = h.counts.world;
  StridedSlots out;
  out.rows_per_expert = world * h.max_tokens;
  out.pairs_per_expert.assign(static_cast<size_t>(h.counts.experts), 0);
  out.slot.assign(h.ids.size(), -1);
  out.alias.assign(h.ids.size(), 0);
  for (int64_t t = 0; t < h.tokens; ++t) {
    const size_t begin = static_cast<size_t>(t) * static_cast<size_t>(h.topk);
    for (size_t f = begin; f < begin + static_cast<size_t>(h.topk); ++f) {
      const int32_t id = h.ids[f];
      if (id < 0) continue;
      size_t first = begin;
      while (h.ids[first] != id) ++first;
      if (first != f) {
        out.slot[f] = out.slot[first];
        out.alias[f] = 1;
        continue;
      }
      const int local_expert = id - h.map.first(h.map.owner(id));
      out.slot[f] = strided_slot(local_expert, world, h.max_tokens, h.rank, out.pairs_per_expert[static_cast<size_t>(id)]++);
    }
  }
  return out;
}

}  // namespace switchyard::detail

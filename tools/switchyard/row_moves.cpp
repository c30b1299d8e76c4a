// SPDX-License-Identifier: Apache-2.0
#include "row_moves.hpp"

#include <algorithm>

namespace switchyard::tool {

PlannedMoves plan_moves(const Scenario& s) {
  PlannedMoves p;
  std::vector<int32_t> next(static_cast<size_t>(s.world), 0);
  double pairs = 0, tokens = 0;
  for (int r = 0; r < s.world; ++r) {
    bench::RowMoves m;
    int64_t remote = 0;
    m.begin.push_back(0);
    for (int64_t t = 0; t < s.tokens(r); ++t) {
      uint64_t mask = 0;
      for (int k = 0; k < s.topk; ++k)
        if (s.valid(s.id(r, t, k))) mask |= uint64_t{1} << s.owner(s.id(r, t, k));
      for (int d = 0; d < s.world; ++d) {
        if ((mask >> d & 1) == 0) continue;
        m.rank.push_back(d);
        m.row.push_back(next[static_cast<size_t>(d)]++);
        remote += d != r;
      }
      m.begin.push_back(static_cast<int32_t>(m.rank.size()));
    }
    pairs += static_cast<double>(m.rank.size());
    tokens += static_cast<double>(s.tokens(r));
    p.remote_pairs = std::max(p.remote_pairs, remote);
    p.moves.push_back(std::move(m));
  }
  p.mean_ranks = tokens > 0 ? pairs / tokens : 0;
  return p;
}

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
#include "check/row_moves.hpp"

#include <algorithm>
#include <utility>

namespace switchyard::tool {

RowCounts count_rows(const Scenario& s) {
  RowCounts n;
  for (int r = 0; r < s.world; ++r) {
    for (int64_t t = 0; t < s.tokens(r); ++t) {
      uint64_t touched = 0;
      for (int k = 0; k < s.topk; ++k) {
        if (!s.valid(s.id(r, t, k))) continue;
        touched |= uint64_t{1} << s.owner(s.id(r, t, k));
        ++n.routes;
      }
      n.pairs += __builtin_popcountll(touched);
      n.remote_pairs += __builtin_popcountll(touched & ~(uint64_t{1} << r));
    }
  }
  return n;
}

PlannedMoves plan_moves(const Scenario& s) {
  PlannedMoves p;
  std::vector<int32_t> next(static_cast<size_t>(s.world), 0);
  double tokens = 0, pairs = 0;
  for (int r = 0; r < s.world; ++r) {
    measure::RowMoves m;
    int64_t remote = 0;
    m.begin.push_back(0);
    for (int64_t t = 0; t < s.tokens(r); ++t) {
      uint64_t mask = 0;
      for (int k = 0; k < s.topk; ++k) {
        if (s.valid(s.id(r, t, k))) mask |= uint64_t{1} << s.owner(s.id(r, t, k));
      }
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

PlannedRoutes plan_routes(const Scenario& s) {
  PlannedRoutes p;
  std::vector<int64_t> rows_of(static_cast<size_t>(s.experts), 0), next(rows_of.size(), 0);
  const auto each_route = [&](int r, int64_t t, auto&& f) {
    for (int k = 0; k < s.topk; ++k)
      if (s.valid(s.id(r, t, k))) f(static_cast<size_t>(s.id(r, t, k)));
  };
  for (int r = 0; r < s.world; ++r)
    for (int64_t t = 0; t < s.tokens(r); ++t) each_route(r, t, [&](size_t e) { ++rows_of[e]; });
  std::vector<int64_t> end(static_cast<size_t>(s.world), 0);
  for (size_t e = 0; e < rows_of.size(); ++e) {
    int64_t& at = end[static_cast<size_t>(s.owner(static_cast<int32_t>(e)))];
    next[e] = at;
    at += (rows_of[e] + s.alignment - 1) / s.alignment * s.alignment;
  }
  p.most_rows = *std::max_element(end.begin(), end.end());
  for (int r = 0; r < s.world; ++r) {
    measure::RowMoves m;
    m.begin.push_back(0);
    for (int64_t t = 0; t < s.tokens(r); ++t) {
      std::vector<std::pair<int32_t, int32_t>> routes;  // rank, row
      each_route(r, t,
                 [&](size_t e) { routes.emplace_back(s.owner(static_cast<int32_t>(e)), static_cast<int32_t>(next[e]++)); });
      std::sort(routes.begin(), routes.end());
      for (const auto& [rank, row] : routes) m.rank.push_back(rank), m.row.push_back(row);
      m.begin.push_back(static_cast<int32_t>(m.rank.size()));
    }
    p.moves.push_back(std::move(m));
  }
  return p;
}

}  // namespace switchyard::tool

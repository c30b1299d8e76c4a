// SPDX-License-Identifier: Apache-2.0
#include "check/row_moves.hpp"
#include "run/index.hpp"

#include <algorithm>
#include <utility>

namespace switchyard::tool {
namespace {

oracle::Problem with_layout(const Scenario& s, Layout layout) {
  oracle::Problem p = s.problem();
  p.layout = layout;
  return p;
}

}  // namespace

RowCounts count_rows(const Scenario& s) {
  const oracle::Expected x = oracle::expect(with_layout(s, Layout::rank_major));
  RowCounts n;
  n.routes = static_cast<int64_t>(x.routes.size());
  for (int r = 0; r < s.world; ++r) {
    for (int d = 0; d < s.world; ++d) {
      n.pairs += x.touching[at(r)][at(d)];
      if (d != r) n.remote_pairs += x.touching[at(r)][at(d)];
    }
  }
  return n;
}

PlannedMoves plan_moves(const Scenario& s) {
  const oracle::Expected x = oracle::expect(with_layout(s, Layout::rank_major));
  PlannedMoves p;
  double tokens = 0, pairs = 0;
  for (int r = 0; r < s.world; ++r) {
    measure::RowMoves m;
    int64_t remote = 0;
    m.begin.push_back(0);
    for (const auto& sends : x.ranks[at(r)].sends) {
      for (const oracle::Send& send : sends) {
        m.rank.push_back(send.rank);
        m.row.push_back(static_cast<int32_t>(send.row));
        remote += send.rank != r;
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
  const oracle::Expected x = oracle::expect(with_layout(s, Layout::expert_major));
  PlannedRoutes p;
  std::vector<std::vector<std::vector<std::pair<int32_t, int32_t>>>> places;  // [rank][token]: rank, row
  for (int r = 0; r < s.world; ++r) {
    places.emplace_back(at(s.tokens(r)));
    p.max_rows = std::max(p.max_rows, x.ranks[at(r)].rows);
  }
  for (const oracle::Route& route : x.routes)
    places[at(route.source)][at(route.token)].emplace_back(route.dest, static_cast<int32_t>(route.slot));
  for (auto& tokens : places) {
    measure::RowMoves m;
    m.begin.push_back(0);
    for (auto& routes : tokens) {
      std::sort(routes.begin(), routes.end());
      for (const auto& [rank, row] : routes) m.rank.push_back(rank), m.row.push_back(row);
      m.begin.push_back(static_cast<int32_t>(m.rank.size()));
    }
    p.moves.push_back(std::move(m));
  }
  return p;
}

}  // namespace switchyard::tool

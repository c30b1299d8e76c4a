// SPDX-License-Identifier: Apache-2.0
// Compares the rows that are moved to measure a benchmark's limits with the rows that a dispatch must deliver.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tools/check/row_moves.hpp"

namespace switchyard::tool {
namespace {

/// 5 experts on 2 ranks (0 to 2 and 3 to 4), top-3, and two tokens per rank; -1 is not an expert.
Scenario small(Layout layout, int alignment) {
  Scenario s;
  s.world = 2;
  s.experts = 5;
  s.topk = 3;
  s.layout = layout;
  s.alignment = alignment;
  s.routing.resize(2);
  s.routing[0].topk_ids = {0, 3, 4, 1, 0, -1};
  s.routing[1].topk_ids = {4, 4, 3, 2, 0, 3};
  for (Routing& r : s.routing) {
    r.num_tokens = 2;
    r.topk = 3;
    r.num_experts = 5;
  }
  return s;
}

using Place = std::pair<int32_t, int32_t>;  ///< rank, row

std::vector<Place> places_of(const measure::RowMoves& m, size_t token) {
  std::vector<Place> all;
  for (int32_t i = m.begin[token]; i < m.begin[token + 1]; ++i)
    all.emplace_back(m.rank[static_cast<size_t>(i)], m.row[static_cast<size_t>(i)]);
  return all;
}

TEST(RowMoves, OfAPairAreCountedByHand) {
  const PlannedMoves p = plan_moves(small(Layout::rank_major, 1));
  EXPECT_EQ(places_of(p.moves[0], 0), (std::vector<Place>{{0, 0}, {1, 0}}));
  EXPECT_EQ(places_of(p.moves[0], 1), (std::vector<Place>{{0, 1}}));
  EXPECT_EQ(places_of(p.moves[1], 0), (std::vector<Place>{{1, 1}}));
  EXPECT_EQ(places_of(p.moves[1], 1), (std::vector<Place>{{0, 2}, {1, 2}}));
  EXPECT_EQ(p.remote_pairs, 1);
  EXPECT_EQ(p.mean_ranks, 1.5);
  const RowCounts n = count_rows(small(Layout::rank_major, 1));
  EXPECT_EQ(n.pairs, 6);
  EXPECT_EQ(n.remote_pairs, 2);
  EXPECT_EQ(n.routes, 11);
}

// Expects one row per route, each at the oracle's location.
TEST(RowMoves, OfRoutesLieWhereDispatchPutsThem) {
  for (const int alignment : {1, 4}) {
    const Scenario s = small(Layout::expert_major, alignment);
    const PlannedRoutes p = plan_routes(s);
    std::map<std::pair<int, int64_t>, std::multiset<Place>> want;
    size_t max = 0, routes = 0;
    for (int d = 0; d < s.world; ++d) {
      const std::vector<oracle::Origin> rows = oracle::rows_to(s.problem(), d);
      max = std::max(max, rows.size());
      for (size_t row = 0; row < rows.size(); ++row) {
        if (rows[row].source < 0) continue;
        want[{rows[row].source, rows[row].token}].emplace(d, static_cast<int32_t>(row));
        ++routes;
      }
    }
    EXPECT_EQ(routes, 11u);
    EXPECT_EQ(p.max_rows, static_cast<int64_t>(max));
    for (int r = 0; r < s.world; ++r) {
      for (int64_t t = 0; t < s.tokens(r); ++t) {
        const std::vector<Place> got = places_of(p.moves[static_cast<size_t>(r)], static_cast<size_t>(t));
        EXPECT_EQ(std::multiset<Place>(got.begin(), got.end()), (want[{r, t}])) << "rank " << r << " token " << t;
        EXPECT_TRUE(std::is_sorted(got.begin(), got.end())) << "rank " << r << " token " << t;
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::tool

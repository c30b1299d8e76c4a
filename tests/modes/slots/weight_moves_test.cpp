// SPDX-License-Identifier: Apache-2.0
// Sources of moved weights. slots_test.cpp covers the copies.
#include "exchange/slots/weight_moves.hpp"

#include <gtest/gtest.h>

namespace switchyard::detail {
namespace {

TEST(WeightMoves, NothingMovesBetweenEqualMaps) {
  const ExpertMap map{3, 2, 2, {0, 1, 2, -1}};
  const WeightMoves moves = plan_moves(map, map);
  EXPECT_EQ(moves.max_sent, 0u);
  EXPECT_TRUE(moves.of_rank[0].empty() && moves.of_rank[1].empty());
  EXPECT_EQ(plan_moves(map, {3, 2, 2, {0, 1, 2, -1}}).max_sent, 0u);
}

TEST(WeightMoves, ARankPrefersItsOwnSlot) {
  const WeightMoves moves = plan_moves({2, 2, 3, {0, 1, -1, 0, -1, -1}}, {2, 2, 3, {0, 1, -1, 1, 0, 0}});
  ASSERT_EQ(moves.of_rank[1].size(), 3u);
  const auto expect = [&](size_t i, int slot, int source, int sent_slot) {
    const WeightMove& move = moves.of_rank[1][i];
    EXPECT_EQ(move.slot, slot);
    EXPECT_EQ(move.source_rank, source);
    EXPECT_EQ(moves.sent_by[static_cast<size_t>(source)][static_cast<size_t>(move.sent)], sent_slot);
  };
  expect(0, 3, 0, 1);
  expect(1, 4, 1, 3);  // although slot 3 is overwritten
  expect(2, 5, 1, 3);
  EXPECT_EQ(moves.sent_by[1].size(), 1u) << "a slot is sent once for all that need it";
  EXPECT_EQ(moves.max_sent, 1u);
}

TEST(WeightMoves, SourcesAlternate) {
  ExpertMap from{2, 8, 2, std::vector<int32_t>(16, -1)};
  from.expert_of_slot[0] = from.expert_of_slot[2] = from.expert_of_slot[4] = 0;  // ranks 0, 1 and 2 hold expert 0
  from.expert_of_slot[5] = 1;                                                    // rank 2 holds expert 1 alone
  ExpertMap to = from;
  for (const int rank : {3, 4, 5, 6, 7}) to.expert_of_slot[static_cast<size_t>(2 * rank)] = 0;
  for (const int rank : {3, 4, 5}) to.expert_of_slot[static_cast<size_t>(2 * rank + 1)] = 1;
  const WeightMoves moves = plan_moves(from, to);
  std::vector<int> sources;
  for (int rank = 3; rank < 8; ++rank) sources.push_back(moves.of_rank[static_cast<size_t>(rank)][0].source_rank);
  EXPECT_EQ(sources, (std::vector<int>{0, 1, 0, 1, 0})) << "rank 2 already sends expert 1";
  EXPECT_EQ(moves.max_sent, 1u);
}

}  // namespace
}  // namespace switchyard::detail

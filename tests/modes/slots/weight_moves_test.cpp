// SPDX-License-Identifier: Apache-2.0
// Sources of moved weights. slots_test.cpp covers the copies.
#include "exchange/slots/weight_moves.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace switchyard::detail {
namespace {

TEST(WeightMoves, NothingMovesBetweenEqualMaps) {
  const ExpertMap map{3, 2, 2, {0, 1, 2, -1}};
  const WeightMoves moves = plan_moves(map, map, HostMap(2));
  EXPECT_EQ(moves.max_staged, 0u);
  EXPECT_TRUE(moves.of_rank[0].empty() && moves.of_rank[1].empty() && moves.parcels.empty());
  EXPECT_EQ(plan_moves(map, {3, 2, 2, {0, 1, 2, -1}}, HostMap(2)).max_staged, 0u);
}

TEST(WeightMoves, ARankPrefersItsOwnSlot) {
  const WeightMoves moves = plan_moves({2, 2, 3, {0, 1, -1, 0, -1, -1}}, {2, 2, 3, {0, 1, -1, 1, 0, 0}}, HostMap(2));
  ASSERT_EQ(moves.of_rank[1].size(), 3u);
  const auto expect = [&](size_t i, int slot, int source, int sent_slot) {
    const WeightMove& move = moves.of_rank[1][i];
    EXPECT_EQ(move.slot, slot);
    EXPECT_EQ(move.source_rank, source);
    EXPECT_EQ(move.source_slot, sent_slot);
    EXPECT_EQ(move.staged_rank, source);
    EXPECT_EQ(move.staged_at, 0u);
  };
  expect(0, 3, 0, 1);
  expect(1, 4, 1, 3);  // although slot 3 is overwritten
  expect(2, 5, 1, 3);
  ASSERT_EQ(moves.parcels.size(), 2u);
  EXPECT_EQ(moves.parcels[1].slots, std::vector<int>{3}) << "a slot is sent once for all that need it";
  EXPECT_EQ(moves.max_staged, 1u);
  EXPECT_EQ(moves.max_crossing, 0u);
}

TEST(WeightMoves, SourcesAlternate) {
  ExpertMap from{2, 8, 2, std::vector<int32_t>(16, -1)};
  from.expert_of_slot[0] = from.expert_of_slot[2] = from.expert_of_slot[4] = 0;  // ranks 0, 1 and 2 hold expert 0
  from.expert_of_slot[5] = 1;                                                    // rank 2 holds expert 1 alone
  ExpertMap to = from;
  for (const int rank : {3, 4, 5, 6, 7}) to.expert_of_slot[static_cast<size_t>(2 * rank)] = 0;
  for (const int rank : {3, 4, 5}) to.expert_of_slot[static_cast<size_t>(2 * rank + 1)] = 1;
  const WeightMoves moves = plan_moves(from, to, HostMap(8));
  std::vector<int> sources;
  for (int rank = 3; rank < 8; ++rank) sources.push_back(moves.of_rank[static_cast<size_t>(rank)][0].source_rank);
  EXPECT_EQ(sources, (std::vector<int>{0, 1, 0, 1, 0})) << "rank 2 already sends expert 1";
  EXPECT_EQ(moves.max_staged, 1u);
}

/// Hosts of three and two ranks: rank r of the first exchanges rows with rank 3 + r % 2, and ranks 3 and 4 with 0 and 1.
TEST(WeightMoves, WeightsCrossOncePerHost) {
  const HostMap hosts(std::vector<std::string>{"a", "a", "a", "b", "b"});
  ExpertMap from{3, 5, 3, std::vector<int32_t>(15, -1)};
  from.expert_of_slot[0] = from.expert_of_slot[3] = 0;  // ranks 0 and 1
  from.expert_of_slot[6] = 1;                           // rank 2
  from.expert_of_slot[12] = 2;                          // rank 4
  ExpertMap to = from;
  for (const int slot : {7, 10, 13}) to.expert_of_slot[static_cast<size_t>(slot)] = 0;  // ranks 2, 3 and 4
  for (const int slot : {11, 14}) to.expert_of_slot[static_cast<size_t>(slot)] = 1;     // ranks 3 and 4
  to.expert_of_slot[8] = 2;                                                             // rank 2
  const WeightMoves moves = plan_moves(from, to, hosts);
  const auto expect = [&](int rank, size_t i, int source, int staged_rank, size_t staged_at) {
    const WeightMove& move = moves.of_rank[static_cast<size_t>(rank)][i];
    EXPECT_EQ(move.source_rank, source) << "rank " << rank;
    EXPECT_EQ(move.staged_rank, staged_rank) << "rank " << rank;
    EXPECT_EQ(move.staged_at, staged_at) << "rank " << rank;
  };
  expect(2, 0, 0, 0, 0);  // on its own host
  expect(2, 1, 4, 1, 0);  // rank 4's proxy on the first host is rank 1
  expect(3, 0, 1, 4, 0);  // rank 1 was chosen less often than rank 0; its proxy is rank 4
  expect(3, 1, 2, 3, 0);
  expect(4, 0, 1, 4, 0);  // which sends the expert to this host already
  expect(4, 1, 2, 3, 0);
  std::vector<int> crossing;
  for (const WeightParcel& parcel : moves.parcels)
    if (parcel.crosses()) crossing.insert(crossing.end(), parcel.slots.begin(), parcel.slots.end());
  EXPECT_EQ(crossing, (std::vector<int>{3, 6, 12}));
  EXPECT_EQ(moves.max_staged, 1u);
  EXPECT_EQ(moves.max_crossing, 2u) << "rank 1 sends one and receives one";
}

}  // namespace
}  // namespace switchyard::detail

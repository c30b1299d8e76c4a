// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/host_map.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace switchyard::detail {
namespace {

HostMap map_of(std::vector<std::string> places) { return HostMap(places); }

TEST(HostMap, NumbersHostsByTheirLowestRanks) {
  const HostMap map = map_of({"z", "a", "z", "m", "a", "z"});
  EXPECT_EQ(map.world(), 6);
  EXPECT_EQ(map.hosts(), 3);
  EXPECT_FALSE(map.one_host());
  EXPECT_EQ(map.ranks_of(0), (std::vector{0, 2, 5}));
  EXPECT_EQ(map.ranks_of(1), (std::vector{1, 4}));
  EXPECT_EQ(map.ranks_of(2), (std::vector{3}));
  EXPECT_EQ(map.host_of(5), 0);
  EXPECT_EQ(map.rail(5), 2);
  EXPECT_EQ(map.rail(3), 0);
  EXPECT_TRUE(map.together(1, 4));
  EXPECT_FALSE(map.together(1, 3));
  EXPECT_EQ(map.text(), "host 0: ranks 0, 2, 5; host 1: ranks 1, 4; host 2: rank 3");
}

TEST(HostMap, ProxiesHaveTheSameRailIndexModuloTheRanksThere) {
  const HostMap map = map_of({"a", "a", "a", "b", "b"});
  EXPECT_EQ(map.proxy(0, 1), 3);
  EXPECT_EQ(map.proxy(1, 1), 4);
  EXPECT_EQ(map.proxy(2, 1), 3);
  EXPECT_EQ(map.proxy(3, 0), 0);
  EXPECT_EQ(map.proxy(4, 0), 1);
  EXPECT_EQ(map.proxy(2, 0), 2) << "on its own host a rank stands for itself";
  EXPECT_EQ(map.rail_peers(0), (std::vector{3}));
  EXPECT_EQ(map.rail_peers(2), (std::vector{3})) << "rank 3 stands for it, though it stands for nobody there";
  EXPECT_EQ(map.rail_peers(3), (std::vector{0, 2}));
  EXPECT_EQ(map.rail_peers(4), (std::vector{1}));
}

TEST(HostMap, OneHostHasNoRails) {
  const HostMap map(64);
  EXPECT_TRUE(map.one_host());
  EXPECT_EQ(map.hosts(), 1);
  EXPECT_EQ(map.text(), "host 0: ranks 0-63");
  for (int r = 0; r < 64; ++r) {
    EXPECT_EQ(map.rail(r), r);
    EXPECT_EQ(map.proxy(r, 0), r);
    EXPECT_TRUE(map.rail_peers(r).empty());
  }
}

TEST(HostMap, EveryRankHasOneProxyPerHostAndRailsAreMutual) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<std::string> places(1 + random() % 64);
    for (std::string& place : places) place = std::to_string(random() % (1 + random() % 8));
    const HostMap map(places);
    std::set<int> seen;
    for (int h = 0; h < map.hosts(); ++h) {
      for (const int r : map.ranks_of(h)) {
        EXPECT_TRUE(seen.insert(r).second);
        EXPECT_EQ(map.host_of(r), h);
        EXPECT_EQ(map.ranks_of(h)[static_cast<size_t>(map.rail(r))], r);
      }
    }
    EXPECT_EQ(seen.size(), places.size());
    for (int a = 0; a < map.world(); ++a) {
      for (int b = 0; b < map.world(); ++b) {
        EXPECT_EQ(map.exchange_rows(a, b), map.exchange_rows(b, a));
        EXPECT_EQ(map.together(a, b), places[static_cast<size_t>(a)] == places[static_cast<size_t>(b)]);
      }
      for (int h = 0; h < map.hosts(); ++h) {
        const int proxy = map.proxy(a, h);
        EXPECT_EQ(map.host_of(proxy), h);
        EXPECT_EQ(map.exchange_rows(a, proxy), h != map.host_of(a));
      }
    }
  }
}

TEST(PlaceOfRank, GoesRoundTheListOfTexts) {
  EXPECT_EQ(place_of_rank("", 3), "");
  EXPECT_EQ(place_of_rank("node7", 3), "node7");
  EXPECT_EQ(place_of_rank("a,a,b", 0), "a");
  EXPECT_EQ(place_of_rank("a,a,b", 2), "b");
  EXPECT_EQ(place_of_rank("a,a,b", 3), "a");
  EXPECT_EQ(place_of_rank("a,", 1), "") << "a text may be empty: one more place";
}

}  // namespace
}  // namespace switchyard::detail

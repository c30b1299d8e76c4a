// SPDX-License-Identifier: Apache-2.0
// Tests the fused layer's protocol on the CPU for exact results and freedom from deadlock with any number of workers, ranks and
// tiles.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "harness/draw.hpp"
#include "harness/fleet.hpp"
#include "modes/fused/fused_rig.hpp"

namespace harness {
namespace {

/// In both orders, whose sums of integers are equal.
void expect_exact(FusedScenario s) {
  for (const bool per_rank : {false, true}) {
    s.per_rank = per_rank;
    SCOPED_TRACE(to_string(s));
    EXPECT_EQ(joined(run_fused_layer(s)), "");
  }
}

/// T differs by rank; with several ranks, one of them has no tokens.
std::vector<int64_t> some_tokens(int world) {
  std::vector<int64_t> tokens;
  for (int r = 0; r < world; ++r) tokens.push_back(world > 1 && r == 1 ? 0 : 11 + 7 * r % 5);
  return tokens;
}

FusedScenario scenario(int world, int workers) {
  FusedScenario s;
  s.world = world;
  s.experts = 2 * world + 1;
  s.topk = 3;
  s.tokens = some_tokens(world);
  s.warps = workers;
  s.up_columns = 2;
  s.down_columns = 3;
  return s;
}

/// A rank's single worker does all work in turn, so it would wait for itself if a tile waited for a higher ticket.
TEST(FusedLayer, OneWorkerOfEachRankSuffices) {
  for (const int world : {1, 2, 3, 8}) {
    for (const int lag : {0, 1, 4, 50}) {
      FusedScenario s = scenario(world, 1);
      s.lag = lag;
      expect_exact(s);
    }
  }
}

TEST(FusedLayer, ManyWorkers) {
  for (const int world : {1, 2, 3, 8}) {
    for (const int workers : {2, 3}) {
      for (const int lag : {0, 2}) {
        FusedScenario s = scenario(world, workers);
        s.lag = lag;
        expect_exact(s);
      }
    }
  }
}

/// In this test, a copy announced before it has settled delivers wrong rows.
TEST(FusedLayer, DeferredCopies) {
  for (const int world : {1, 3}) {
    for (const int workers : {1, 3}) {
      FusedScenario s = scenario(world, workers);
      s.deferred = true;
      expect_exact(s);
    }
  }
}

TEST(FusedLayer, OneTilePerExpert) {
  FusedScenario s = scenario(3, 2);
  s.up_columns = s.down_columns = 1;
  s.tile_rows = 1000;
  expect_exact(s);
}

TEST(FusedLayer, NoTokens) {
  for (const int world : {1, 3}) {
    FusedScenario s = scenario(world, 2);
    s.tokens.assign(s.tokens.size(), 0);
    expect_exact(s);
  }
}

TEST(FusedLayer, OneExpertHasEverything) {
  for (const int workers : {1, 3}) {
    FusedScenario s = scenario(3, workers);
    s.one_expert = true;
    expect_exact(s);
  }
}

TEST(FusedLayer, FewerExpertsThanRanks) {
  FusedScenario s = scenario(8, 2);
  s.experts = 3;
  expect_exact(s);
}

TEST(FusedLayer, RoutesBeyondCapacityAreDropped) {
  for (const int workers : {1, 3}) {
    FusedScenario s = scenario(3, workers);
    s.capacity = 5;
    expect_exact(s);
    s.one_expert = true;
    expect_exact(s);
    s.capacity = 0;
    expect_exact(s);
  }
}

TEST(FusedLayer, SumsBeginWithWhatTheOutputHolds) {
  FusedScenario s = scenario(2, 2);
  s.add = true;
  s.weighted = false;
  expect_exact(s);
}

TEST(FusedLayer, TokensThatTheCallerMakesInTheHeap) {
  FusedScenario s = scenario(3, 2);
  s.in_heap = true;
  s.blocks = 2;
  expect_exact(s);
}

TEST(FusedLayer, OneRouteOfEachToken) {
  FusedScenario s = scenario(2, 1);
  s.topk = 1;
  s.tile_rows = 1;
  expect_exact(s);
}

/// SWITCHYARD_RANDOM_LAYERS: the number of layers (default: 40).
TEST(FusedLayer, RandomShapes) {
  const uint64_t layers = from_environment("SWITCHYARD_RANDOM_LAYERS", 40);
  for (uint64_t i = 0; i < layers && !HasFailure(); ++i) {
    Draw draw(i);
    FusedScenario s;
    s.world = static_cast<int>(draw.between(1, 5));
    s.experts = static_cast<int>(draw.between(1, 20));
    s.topk = static_cast<int>(draw.between(1, 8));
    s.tokens.clear();
    for (int r = 0; r < s.world; ++r) s.tokens.push_back(draw.one_in(4) ? 0 : draw.between(1, 30));
    s.one_expert = draw.one_in(6);
    if (draw.one_in(3)) s.capacity = draw.between(0, 20);
    s.lag = static_cast<int>(draw.between(0, 22));
    s.up_columns = static_cast<int>(draw.between(1, 5));
    s.down_columns = static_cast<int>(draw.between(1, 5));
    s.tile_rows = static_cast<int>(draw.between(1, 20));
    s.weighted = draw.one_in(2);
    s.add = draw.one_in(3);
    s.in_heap = draw.one_in(3);
    s.blocks = static_cast<int>(draw.between(1, 2));
    s.warps = static_cast<int>(draw.between(1, 2));
    s.deferred = draw.one_in(2);
    expect_exact(s);
  }
}

/// No rank continues without the tokens from all ranks, and none waits forever.
TEST(FusedLayer, TheDeadlineNamesARankThatIsMissing) {
  for (const int workers : {1, 3}) {
    FusedScenario s = scenario(3, workers);
    s.absent = 2;
    std::vector<std::string> expected;
    for (const char* rank : {"0", "1"})
      expected.push_back(std::string("rank ") + rank + " call 0: a wait for layer_told of rank 2 ended in a fault");
    for (const bool per_rank : {false, true}) {
      s.per_rank = per_rank;
      std::vector<std::string> found;
      for (const int deadline_ms : {300, 3000, 30000}) {  // a loaded machine may hold up the rank that is not missing, too
        s.deadline_ms = deadline_ms;
        found = run_fused_layer(s);
        if (joined(found).find("of rank 0") == std::string::npos && joined(found).find("of rank 1") == std::string::npos) break;
      }
      EXPECT_EQ(found, expected);
    }
  }
}

}  // namespace
}  // namespace harness

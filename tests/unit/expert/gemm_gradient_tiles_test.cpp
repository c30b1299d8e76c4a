// SPDX-License-Identifier: Apache-2.0
// The division of weight gradients into tiles and stages: every gradient and every row occurs exactly once, in worked examples
// and for all sizes.
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "gemm/gradients/gradient_tiles.hpp"

namespace {

using namespace switchyard::detail::gemm;

TEST(GradientTiles, ByHand) {
  EXPECT_EQ(gradient_tiles_n(8), 1);
  EXPECT_EQ(gradient_tiles_n(256), 1);
  EXPECT_EQ(gradient_tiles_n(264), 2);
  EXPECT_EQ(gradient_tiles_k(192), 1);
  EXPECT_EQ(gradient_tiles_k(200), 2);
  // 7168 columns form 37 tiles of 192 and one of 64.
  EXPECT_EQ(gradient_tiles_k(7168), 38);
  EXPECT_EQ(gradient_tile_width(7168, 36), 192);
  EXPECT_EQ(gradient_tile_width(7168, 37), 64);
  EXPECT_EQ(gradient_tile_width(2048, 10), 128);
  EXPECT_EQ(gradient_tile_width(8, 0), 64);
  EXPECT_EQ(gradient_tile_width(136, 0), 192);
}

TEST(GradientTiles, CoverEveryColumnOnce) {
  for (int k = 8; k <= 3000; k += 8) {
    int covered = 0;
    for (int tile = 0; tile < gradient_tiles_k(k); ++tile) {
      const int width = gradient_tile_width(k, tile);
      ASSERT_TRUE(width == 64 || width == 128 || width == 192) << width;
      ASSERT_TRUE(width == 192 || tile + 1 == gradient_tiles_k(k)) << "only the last one is narrow, k " << k;
      ASSERT_GT(k - tile * kGradientTileK, width - kChunkColumns) << "no chunk without a column, k " << k;
      covered += width;
    }
    ASSERT_GE(covered, k);
    ASSERT_LT(covered, k + kChunkColumns);
  }
}

TEST(GradientTiles, StagesHoldEveryRow) {
  EXPECT_EQ(tile_stages(0), 0);
  EXPECT_EQ(tile_stages(1), kEndStages + 1);
  EXPECT_EQ(tile_stages(512), 16);
  EXPECT_EQ(tile_stages(513), 17);
  for (int rows = 1; rows < 2000; ++rows) {
    ASSERT_GE(count_stages(rows) * kStageRows, rows);
    ASSERT_LT((count_stages(rows) - 1) * kStageRows, rows) << "no stage without a row, " << rows;
    ASSERT_GT(tile_stages(rows), kEndStages);
    ASSERT_GE(tile_stages(rows), count_stages(rows));
  }
}

TEST(GradientTiles, TicketsReachEveryTileOnce) {
  for (int tiles_n = 1; tiles_n <= 40; ++tiles_n) {
    for (const int tiles_k : {1, 2, 7, 38}) {
      std::set<std::pair<int, int>> seen;
      for (int64_t ticket = 0; ticket < static_cast<int64_t>(tiles_n) * tiles_k; ++ticket) {
        const GradientPlace p = gradient_place(ticket, tiles_n, tiles_k);
        ASSERT_TRUE(p.tile_n >= 0 && p.tile_n < tiles_n && p.tile_k >= 0 && p.tile_k < tiles_k)
            << "ticket " << ticket << " of " << tiles_n << " x " << tiles_k;
        ASSERT_TRUE(seen.emplace(p.tile_n, p.tile_k).second) << "twice: ticket " << ticket;
      }
    }
  }
}

// 16 tiles along N form one band: the tiles for the same range of K are adjacent, so x passes through the cache once.
TEST(GradientTiles, BandsShareX) {
  for (int64_t ticket = 0; ticket < 16; ++ticket) EXPECT_EQ(gradient_place(ticket, 16, 38).tile_k, 0);
  EXPECT_EQ(gradient_place(16, 16, 38).tile_k, 1);
  // 17 tiles form bands of 9 and 8 tiles.
  EXPECT_EQ(gradient_place(9, 17, 38).tile_k, 1);
  EXPECT_EQ(gradient_place(9 * 38, 17, 38).tile_n, 9);
}

TEST(GradientTiles, StagesThatFit) {
  constexpr uint32_t kSharedBytes = 232448;  // shared memory of a block on sm_90
  EXPECT_EQ(gradient_stage_bytes(), 28672u);
  EXPECT_EQ(fitting_stages(kSharedBytes, 64), 6u);
  EXPECT_EQ(fitting_stages(kSharedBytes, 2048), 6u);
  EXPECT_EQ(fitting_stages(1 << 30, 1), 15u);
}

}  // namespace

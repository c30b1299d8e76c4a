// SPDX-License-Identifier: Apache-2.0
// The division of the grouped GEMM on GPUs into tiles of nearly equal size: every row and every tile occurs exactly once, in
// worked examples and for all sizes.
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "gemm/gpu/row_tiles.hpp"

namespace {

using namespace switchyard::detail;

TEST(RowTiles, ByHand) {
  EXPECT_EQ(count_row_tiles(0, 192), 0);
  EXPECT_EQ(count_row_tiles(192, 192), 1);
  EXPECT_EQ(count_row_tiles(193, 192), 2);
  // 512 rows are 32 steps, which form tiles of 11, 11 and 10 steps.
  EXPECT_EQ(count_row_tiles(512, 192), 3);
  EXPECT_EQ(row_tile(512, 0, 192).width, 176);
  EXPECT_EQ(row_tile(512, 1, 192).first, 176);
  EXPECT_EQ(row_tile(512, 2, 192).first, 352);
  EXPECT_EQ(row_tile(512, 2, 192).width, 160);
  EXPECT_EQ(row_tile(17, 0, 192).width, 32);
  EXPECT_EQ(row_tile(17, 0, 192).rows, 17);
  EXPECT_EQ(widest_row_tile(0, 192), 0);
  EXPECT_EQ(widest_row_tile(1, 192), 16);
}

TEST(RowTiles, CoverEveryRowOnce) {
  for (const int max : {16, 128, 192}) {
    for (int64_t rows = 1; rows <= 3000; rows += rows < 500 ? 1 : 37) {
      const int tiles = count_row_tiles(rows, max);
      int64_t at = 0;
      int narrowest = max, widest = 0;
      for (int i = 0; i < tiles; ++i) {
        const RowTile t = row_tile(rows, i, max);
        ASSERT_EQ(t.first, at) << rows << " rows, tile " << i;
        ASSERT_EQ(t.width % kRowStep, 0);
        ASSERT_GT(t.rows, t.width - kRowStep) << rows << " rows, tile " << i << ": no step without a row";
        ASSERT_LE(t.rows, t.width);
        at += t.rows;
        narrowest = t.width < narrowest ? t.width : narrowest;
        widest = t.width > widest ? t.width : widest;
      }
      ASSERT_EQ(at, rows);
      ASSERT_LE(widest, max);
      ASSERT_LE(widest - narrowest, kRowStep);
      ASSERT_EQ(widest, widest_row_tile(rows, max));
    }
  }
}

TEST(RowTiles, TicketsReachEveryTileOnce) {
  for (int row_tiles = 1; row_tiles <= 40; ++row_tiles) {
    for (const int column_tiles : {1, 2, 7, 28}) {
      std::set<std::pair<int, int>> seen;
      for (int64_t ticket = 0; ticket < static_cast<int64_t>(row_tiles) * column_tiles; ++ticket) {
        const TilePlace p = tile_place(ticket, row_tiles, column_tiles);
        ASSERT_TRUE(p.row_tile >= 0 && p.row_tile < row_tiles && p.column_tile >= 0 && p.column_tile < column_tiles)
            << "ticket " << ticket << " of " << row_tiles << " x " << column_tiles;
        ASSERT_TRUE(seen.emplace(p.row_tile, p.column_tile).second) << "twice: ticket " << ticket;
      }
    }
  }
}

TEST(RowTiles, BandsShareWeights) {
  // 9 row tiles form bands of 5 and 4; within a band, the row tiles of a column tile are adjacent.
  for (int64_t ticket = 0; ticket < 5; ++ticket) EXPECT_EQ(tile_place(ticket, 9, 3).column_tile, 0);
  EXPECT_EQ(tile_place(5, 9, 3).column_tile, 1);
  EXPECT_EQ(tile_place(5, 9, 3).row_tile, 0);
  EXPECT_EQ(tile_place(15, 9, 3).row_tile, 5);
  EXPECT_EQ(tile_place(15, 9, 3).column_tile, 0);
}

TEST(RowTiles, MoreThanTwoToTheThirtyOneTickets) {
  const TilePlace last = tile_place(int64_t{1 << 20} * 4096 - 1, 1 << 20, 4096);
  EXPECT_EQ(last.row_tile, (1 << 20) - 1);
  EXPECT_EQ(last.column_tile, 4095);
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0
// The tiles of the fp8 kernel for many rows: every unit of rows and every column tile is computed by exactly one block, in
// worked examples and for all sizes.
#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "gemm/gpu/fp8/wide_tiles.hpp"

namespace {

using namespace switchyard::detail;

TEST(WideTiles, ByHand) {
  // 500 rows are 8 units: two tiles that share weights, for each of three column tiles.
  EXPECT_EQ(count_wide_tiles(500, 3), 6);
  // 600 rows are 10 units: 2 more units share rows, for column tiles 0 and 1, and for 2 alone.
  EXPECT_EQ(count_wide_tiles(600, 3), 8);
  // Consecutive tiles share column tiles: both of column tile 0, both of column tile 1, then the rest of both.
  const auto expect = [](int64_t ticket, int64_t first_unit, int units, int column_tile, bool shares_weights) {
    const WideTile t = wide_tile(600, ticket, 3);
    EXPECT_EQ(t.first_unit, first_unit) << ticket;
    EXPECT_EQ(t.units, units) << ticket;
    EXPECT_EQ(t.column_tile, column_tile) << ticket;
    EXPECT_EQ(t.shares_weights, shares_weights) << ticket;
  };
  expect(0, 0, 2, 0, true);
  expect(1, 4, 2, 0, true);
  expect(2, 0, 2, 1, true);
  expect(3, 4, 2, 1, true);
  expect(4, 8, 2, 0, false);
  expect(5, 0, 2, 2, true);
  expect(6, 4, 2, 2, true);
  expect(7, 8, 2, 2, false);
  // 3 units: a tile with two of them, and one with one.
  EXPECT_EQ(wide_tile(129, 0, 1).units, 2);
  EXPECT_EQ(wide_tile(129, 1, 1).units, 1);
  EXPECT_EQ(count_wide_tiles(0, 4), 0);
}

/// Counts how often each unit and column tile occurs, and checks that no block has only missing rows.
void expect_each_once(int64_t rows, int column_tiles) {
  std::map<std::pair<int64_t, int>, int> seen;
  const int64_t units = (rows + kWideUnit - 1) / kWideUnit;
  for (int64_t ticket = 0; ticket < count_wide_tiles(rows, column_tiles); ++ticket) {
    const WideTile t = wide_tile(rows, ticket, column_tiles);
    ASSERT_GE(t.units, 1);
    ASSERT_LE(t.units, kWideBlockUnits);
    for (int block = 0; block < 2; ++block)
      for (int unit = 0; unit < t.units; ++unit) {
        const int column = t.column_tile + (t.shares_weights ? 0 : block);
        if (column >= column_tiles) continue;  // the second block of the last column tile
        ++seen[{t.first_unit + unit + (t.shares_weights ? block * kWideBlockUnits : 0), column}];
      }
  }
  ASSERT_EQ(seen.size(), static_cast<size_t>(units * column_tiles)) << rows << " rows, " << column_tiles << " column tiles";
  for (const auto& [at, times] : seen) {
    ASSERT_EQ(times, 1) << rows << " rows, " << column_tiles << " column tiles: unit " << at.first << ", column " << at.second;
    ASSERT_LT(at.first, units);
    ASSERT_LT(at.second, column_tiles);
  }
}

TEST(WideTiles, EveryUnitOnce) {
  for (const int column_tiles : {1, 2, 3, 16, 17})
    for (int64_t rows = 1; rows < 700; rows += rows < 300 ? 1 : 37) expect_each_once(rows, column_tiles);
  for (const int64_t rows : {2047, 2048, 2049, 2112, 2240, 4096, 4097, 6000, 32768})
    for (const int column_tiles : {1, 4, 5}) expect_each_once(rows, column_tiles);
}

TEST(WideTiles, RowTilesAreTheirRows) {
  for (int64_t rows = 0; rows < 3000; ++rows) {
    const int tiles = count_wide_row_tiles(rows);
    ASSERT_LE(tiles, rows / kWideSharedRows + 1) << rows << " rows";
    std::map<int64_t, std::pair<int, bool>> by_first;  // of wide_tile(), with one column tile
    for (int64_t ticket = 0; ticket < count_wide_tiles(rows, 1); ++ticket) {
      const WideTile t = wide_tile(rows, ticket, 1);
      by_first[t.first_unit * kWideUnit] = {t.units * kWideUnit * (t.shares_weights ? 2 : 1), t.shares_weights};
    }
    ASSERT_EQ(by_first.size(), static_cast<size_t>(tiles)) << rows << " rows";
    int64_t at = 0;
    for (int i = 0; i < tiles; ++i) {
      const RowTile t = wide_row_tile(rows, i);
      ASSERT_EQ(t.first, at) << rows << " rows, tile " << i;
      ASSERT_EQ(by_first.count(at), 1U) << rows << " rows, tile " << i;
      ASSERT_EQ(by_first[at], std::pair(t.width, t.width > kWideSharedRows)) << rows << " rows, tile " << i;
      ASSERT_TRUE(t.rows <= t.width && t.rows > t.width - kWideUnit) << rows << " rows, tile " << i;
      at += t.rows;
    }
    ASSERT_EQ(at, rows);
  }
}

}  // namespace

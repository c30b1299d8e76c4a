// SPDX-License-Identifier: Apache-2.0
// The tiles of the fp8 kernels for many rows: every unit of rows and every column tile is computed by exactly one block, in
// worked examples and for all sizes. The same holds for the fused layer. There, blocks also set each flag exactly once, and
// the tickets of the up tiles that a down tile waits for precede its own.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "gemm/gpu/fp8/wide_tiles.hpp"
#include "protocol/fused/tickets.hpp"

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

TEST(WideParts, ByHand) {
  const auto expect = [](const WidePart& part, int first, int rows, int width, int column_tile) {
    EXPECT_EQ(std::tuple(part.first, part.rows, part.width, part.column_tile), std::tuple(first, rows, width, column_tile));
  };
  // 193 to 256 rows: the blocks share the weights of column tile 3 and have two units each.
  expect(wide_part(193, 256, 3, 0), 0, 128, 128, 3);
  expect(wide_part(193, 256, 3, 1), 128, 65, 128, 3);
  // One or two units: the blocks share the rows and have a column tile each.
  expect(wide_part(65, 128, 2, 0), 0, 65, 128, 2);
  expect(wide_part(65, 128, 2, 1), 0, 65, 128, 3);
  expect(wide_part(1, 64, 2, 1), 0, 1, 64, 3);
  EXPECT_TRUE(has_wide_tile(256, 3));
  EXPECT_TRUE(has_wide_tile(128, 2));
  EXPECT_FALSE(has_wide_tile(128, 3));
  EXPECT_FALSE(has_wide_tile(64, 1));
}

/// The tiles of one rank's fused layer in fp8. Tickets are claimed one after the other.
class FusedWideTiles {
 public:
  FusedWideTiles(std::vector<int64_t> rows, int lag, int up_columns, int down_columns) : rows_(std::move(rows)) {
    for (const int64_t r : rows_) first_.push_back(first_.back() + count_wide_row_tiles(r));
    order_ = {first_.data(), static_cast<int>(rows_.size()), lag, up_columns, down_columns};
  }
  void expect_all() {
    for (int ticket = 0; ticket < count_tickets(order_); ++ticket) claim(ticket);
    for (const bool down : {false, true}) {
      const int columns = columns_of(down);
      std::set<Unit> units;
      for (int e = 0; e < order_.experts; ++e)
        for (int64_t row = 0; row < rows_[static_cast<size_t>(e)]; row += kWideUnit)
          for (int column = 0; column < columns; ++column) units.insert({e, row, column});
      EXPECT_EQ(units_[down], units) << (down ? "down" : "up");
      EXPECT_EQ(flags_[down].size(), static_cast<size_t>(first_.back() * columns * kWideFlags)) << (down ? "down" : "up");
    }
  }

 private:
  using Unit = std::tuple<int, int64_t, int>;  ///< expert, first row, column tile

  int columns_of(bool down) const { return down ? order_.down_columns : order_.up_columns; }
  void claim(int ticket) {
    const TicketPlace p = ticket_place(order_, static_cast<uint32_t>(ticket));
    const int64_t rows = rows_[static_cast<size_t>(p.expert)];
    const int columns = columns_of(p.down);
    const TilePlace place = tile_place(p.at, count_wide_row_tiles(rows), columns);
    const RowTile t = wide_row_tile(rows, place.row_tile);
    if (!has_wide_tile(t.width, place.column_tile)) return;
    const int index = first_[static_cast<size_t>(p.expert)] + place.row_tile;
    if (p.down) {
      const FlagRange awaited = awaited_by_down(index, order_.up_columns * kWideFlags);
      for (int64_t f = awaited.first; f < awaited.first + awaited.count; ++f)
        EXPECT_EQ(flags_[0].count(f), 1U) << "ticket " << ticket << " waits for flag " << f;
    }
    const bool shares_weights = !shares_wide_rows(t.width);
    WideFlags set[2];
    int columns_of_blocks[2];
    for (int block = 0; block < 2; ++block) {
      const WidePart part = wide_part(t.rows, t.width, place.column_tile, block);
      columns_of_blocks[block] = part.column_tile;
      set[block] = wide_flags(shares_weights, part.column_tile, columns, block);
      compute(p, t.first, part, columns);
      for (int f = set[block].first; f < set[block].first + set[block].count; ++f)
        EXPECT_TRUE(flags_[p.down].insert(flag_of_tile(index, columns * kWideFlags, part.column_tile * kWideFlags + f)).second);
    }
    for (int block = 0; block < 2; ++block)
      EXPECT_EQ(sets_flags_alone(shares_weights, columns_of_blocks[block], columns, block), set[1 - block].count == 0)
          << "ticket " << ticket;
  }
  void compute(const TicketPlace& p, int64_t first, const WidePart& part, int columns) {
    EXPECT_TRUE(part.rows <= part.width && part.rows > part.width - kWideUnit) << part.rows << " of " << part.width;
    if (part.column_tile >= columns) return;
    for (int row = 0; row < part.width; row += kWideUnit)
      EXPECT_TRUE(units_[p.down].insert({p.expert, first + part.first + row, part.column_tile}).second);
  }

  std::vector<int64_t> rows_;
  std::vector<int> first_{0};
  TicketOrder order_;
  std::set<Unit> units_[2];
  std::set<int64_t> flags_[2];
};

TEST(FusedWideTiles, EachUnitAndFlagOnceAndNeverTooEarly) {
  std::vector<std::vector<int64_t>> all{{}, {0, 0}, {449, 0, 63, 2300, 1}, {0, 64, 65, 0}, {5000}, {128, 192, 256, 320, 384}};
  for (int64_t rows = 1; rows <= 600; rows += rows % 64 < 2 || rows % 64 == 63 ? 1 : 20) all.push_back({rows});
  for (const std::vector<int64_t>& rows : all)
    for (const int lag : {0, 1, static_cast<int>(rows.size())})
      for (const auto& [up, down] : {std::pair{1, 1}, {1, 4}, {2, 1}, {3, 2}, {16, 5}}) {
        SCOPED_TRACE(testing::Message() << testing::PrintToString(rows) << ", lag " << lag << ", columns " << up << " and "
                                        << down);
        FusedWideTiles(rows, lag, up, down).expect_all();
        if (testing::Test::HasFailure()) return;
      }
}

/// A half of a layer has the tiles of one product only; its down tiles wait for no flags.
TEST(FusedWideTiles, OfHalves) {
  for (const int columns : {1, 2, 5}) {
    FusedWideTiles({300, 0, 64, 129}, 2, columns, 0).expect_all();
    FusedWideTiles({300, 0, 64, 129}, 2, 0, columns).expect_all();
  }
}

}  // namespace

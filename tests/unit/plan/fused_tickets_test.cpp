// SPDX-License-Identifier: Apache-2.0
// Compares the tickets of a fused layer's tiles with an enumeration of the tiles: every tile occurs exactly once, and none
// precedes the tiles that it waits for.
#include <gtest/gtest.h>

#include <set>
#include <tuple>
#include <vector>

#include "protocol/fused/tickets.hpp"

namespace {

using namespace switchyard::detail;

std::vector<int> first_tiles_of(const std::vector<int>& row_tiles) {
  std::vector<int> first{0};
  for (const int n : row_tiles) first.push_back(first.back() + n);
  return first;
}

/// Enumerates all tiles in ticket order, directly from the definition.
std::vector<TicketPlace> enumerate(const std::vector<int>& row_tiles, int lag, int up, int down) {
  std::vector<TicketPlace> all;
  const int experts = static_cast<int>(row_tiles.size());
  for (int step = 0; step < experts + lag; ++step) {
    if (step < experts)
      for (int i = 0; i < row_tiles[static_cast<size_t>(step)] * up; ++i) all.push_back({step, false, i});
    if (step >= lag)
      for (int i = 0; i < row_tiles[static_cast<size_t>(step - lag)] * down; ++i) all.push_back({step - lag, true, i});
  }
  return all;
}

struct Shape {
  std::vector<int> row_tiles;
  int up, down;
};
const Shape kShapes[] = {{{1}, 1, 1},
                         {{0}, 1, 1},
                         {{3, 0, 2}, 2, 3},
                         {{0, 0, 5}, 1, 4},
                         {{4, 1, 0, 0}, 3, 1},
                         {{0, 0, 0}, 2, 2},
                         {{1, 1, 1, 1, 1, 1}, 1, 1},
                         {{}, 2, 2},
                         {{7, 0, 1, 0, 2}, 5, 3}};

template <class F>
void for_each_order(F&& f) {
  for (const Shape& s : kShapes) {
    const int experts = static_cast<int>(s.row_tiles.size());
    const std::vector<int> first = first_tiles_of(s.row_tiles);
    for (const int lag : {0, 1, 2, experts, experts + 3}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(s.row_tiles) << ", lag " << lag << ", columns " << s.up
                                      << " and " << s.down);
      f(TicketOrder{first.data(), experts, lag, s.up, s.down}, enumerate(s.row_tiles, lag, s.up, s.down));
    }
  }
}

TEST(FusedTickets, ByHand) {
  // Expert 0 has one row tile, and expert 1 has two; there is one column tile for up and two for down; the lag is 1.
  const int first[] = {0, 1, 3};
  const TicketOrder o{first, 2, 1, 1, 2};
  EXPECT_EQ(count_tickets(o), 3 * 1 + 3 * 2);
  EXPECT_EQ(step_tickets(o, 1), 1);          // up tile of expert 0
  EXPECT_EQ(step_tickets(o, 2), 1 + 2 + 2);  // plus up tiles of expert 1 and down tiles of expert 0
  const TicketPlace p = ticket_place(o, 4);
  EXPECT_EQ(p.expert, 0);
  EXPECT_TRUE(p.down);
  EXPECT_EQ(p.at, 1);
}

TEST(FusedTickets, AreThoseOfTheEnumeration) {
  for_each_order([](const TicketOrder& o, const std::vector<TicketPlace>& all) {
    ASSERT_EQ(count_tickets(o), static_cast<int>(all.size()));
    for (size_t i = 0; i < all.size(); ++i) {
      const TicketPlace p = ticket_place(o, static_cast<uint32_t>(i));
      ASSERT_EQ(std::tuple(p.expert, p.down, p.at), std::tuple(all[i].expert, all[i].down, all[i].at)) << "ticket " << i;
    }
  });
}

/// Number of a row tile among all row tiles of the rank. In `at`, the row tiles of a column tile are adjacent.
int row_tile_of(const TicketOrder& o, const TicketPlace& p) {
  return o.first_tiles[p.expert] + p.at % (o.first_tiles[p.expert + 1] - o.first_tiles[p.expert]);
}
int column_of(const TicketOrder& o, const TicketPlace& p) {
  return p.at / (o.first_tiles[p.expert + 1] - o.first_tiles[p.expert]);
}

/// A single worker that takes tickets in order never takes a tile whose flags are not set, and sets each flag once.
TEST(FusedTickets, ATileWaitsForLowerTicketsAlone) {
  for_each_order([](const TicketOrder& o, const std::vector<TicketPlace>& all) {
    std::set<int64_t> h_done, y_done;
    for (size_t i = 0; i < all.size(); ++i) {
      const TicketPlace p = ticket_place(o, static_cast<uint32_t>(i));
      const int tile = row_tile_of(o, p);
      if (p.down) {
        const FlagRange flags = awaited_by_down(tile, o.up_columns);
        ASSERT_EQ(flags.count, o.up_columns);
        for (int64_t f = flags.first; f < flags.first + flags.count; ++f) ASSERT_TRUE(h_done.count(f)) << "ticket " << i;
      }
      const int columns = p.down ? o.down_columns : o.up_columns;
      ASSERT_TRUE((p.down ? y_done : h_done).insert(flag_of_tile(tile, columns, column_of(o, p))).second) << "ticket " << i;
    }
    for (int tile = 0; tile < o.first_tiles[o.experts]; ++tile) {
      const FlagRange flags = awaited_by_return(tile, tile + 1, o.down_columns);
      for (int64_t f = flags.first; f < flags.first + flags.count; ++f) ASSERT_EQ(y_done.erase(f), 1u) << "row tile " << tile;
    }
    ASSERT_TRUE(y_done.empty());
  });
}

TEST(FusedTickets, RowTilesHaveTheirExperts) {
  for_each_order([](const TicketOrder& o, const std::vector<TicketPlace>&) {
    for (int tile = 0; tile < o.first_tiles[o.experts]; ++tile) {
      const int expert = expert_of_tile(o.first_tiles, o.experts, tile);
      ASSERT_LE(o.first_tiles[expert], tile);
      ASSERT_GT(o.first_tiles[expert + 1], tile);
    }
  });
}

TEST(FusedPulls, ByHand) {
  const PullOrder o{3, 2};
  const std::vector<std::vector<int64_t>> rows{{0, 3}, {1, 4}, {2, 5}, {6, 9}, {7, 10}};
  for (size_t ticket = 0; ticket < rows.size(); ++ticket) {
    const auto t = static_cast<int>(ticket);
    EXPECT_EQ(pulled_stretch(o, t), t < 3 ? 0 : 6) << "ticket " << t;
    for (int i = 0; i < 2; ++i) EXPECT_EQ(pulled_row(o, t, i), rows[ticket][static_cast<size_t>(i)]) << "ticket " << t;
  }
}

/// Tickets are taken until a stretch begins beyond the last row; together, their separate stretches cover every row once.
TEST(FusedPulls, TakeEachRowOnce) {
  for (const int warps : {1, 2, 7, 132})
    for (const int together : {1, 8, 13, 32})
      for (const int64_t rows : {0, 1, 131, 132, 133, 5000}) {
        SCOPED_TRACE(testing::Message() << warps << " warps, " << together << " together, " << rows << " rows");
        const PullOrder o{warps, together};
        std::set<int64_t> taken;
        int64_t before = 0;
        for (int ticket = 0; pulled_stretch(o, ticket) < rows; ++ticket) {
          ASSERT_LE(before, pulled_stretch(o, ticket));
          before = pulled_stretch(o, ticket);
          for (int i = 0; i < together; ++i) {
            const int64_t row = pulled_row(o, ticket, i);
            ASSERT_GE(row, before);
            ASSERT_LT(row, before + warps * together);
            if (row < rows) {
              ASSERT_TRUE(taken.insert(row).second) << "row " << row;
            }
          }
        }
        ASSERT_EQ(taken.size(), static_cast<size_t>(rows));
      }
}

TEST(FusedTickets, AwaitedRows) {
  const FlagRange rows = awaited_by_up(40, 16);
  EXPECT_EQ(rows.first, 40);
  EXPECT_EQ(rows.count, 16);
}

}  // namespace

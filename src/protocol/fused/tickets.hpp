// SPDX-License-Identifier: Apache-2.0
// The order of a fused layer's tiles and pulled rows, and the flags that each tile waits for and sets. Pure functions for host
// and device.
//
// Tickets number all tiles of a rank: in each step s, first the up tiles of expert s, then the down tiles of expert s - lag.
// Workers claim tickets in ascending order and compute the tiles in that order. An up tile waits for rows, which do not depend
// on tickets. A down tile waits for all up tiles of its rows, which have lower tickets for any lag. The lowest unfinished
// ticket can therefore always proceed, regardless of which worker holds it, and a single worker suffices.
#pragma once

#include <cstdint>

#include "base/macros.hpp"

namespace switchyard::detail {

/// The tiles of a rank: its experts' row tiles, in ascending order, times column tiles.
struct TicketOrder {
  const int* first_tiles = nullptr;  ///< [experts + 1] row tiles of the experts before e; the last entry: all row tiles
  int experts = 0;
  int lag = 0;                           ///< steps between an expert's up tiles and its down tiles, at least 0
  int up_columns = 1, down_columns = 1;  ///< 0: that product is not part of the call
};

/// Number of tickets in the steps before `step`, which is in [0, experts + lag].
SWITCHYARD_INLINE int step_tickets(const TicketOrder& o, int step) {
  const int e = o.experts, up = step < e ? step : e, late = step - o.lag, down = late < 0 ? 0 : late < e ? late : e;
  return o.up_columns * o.first_tiles[up] + o.down_columns * o.first_tiles[down];
}
SWITCHYARD_INLINE int count_tickets(const TicketOrder& o) { return step_tickets(o, o.experts + o.lag); }

/// A tile of a rank.
struct TicketPlace {
  int expert = 0;
  bool down = false;
  int at = 0;  ///< index among the expert's tiles of this product: [0, row tiles * column tiles)
};

/// The tile of a ticket in [0, count_tickets).
SWITCHYARD_INLINE TicketPlace ticket_place(const TicketOrder& o, uint32_t ticket) {
  int low = 0, high = o.experts + o.lag;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (static_cast<uint32_t>(step_tickets(o, middle)) <= ticket)
      low = middle;
    else
      high = middle;
  }
  TicketPlace p{low, true, static_cast<int>(ticket) - step_tickets(o, low)};
  if (low < o.experts) {
    const int ups = o.up_columns * (o.first_tiles[low + 1] - o.first_tiles[low]);
    p.down = p.at >= ups;
    if (p.down) p.at -= ups;
  }
  if (p.down) p.expert = low - o.lag;
  return p;
}

/// The expert of row tile `tile`, which is an index among all row tiles of the rank.
SWITCHYARD_INLINE int expert_of_tile(const int* first_tiles, int experts, int tile) {
  int low = 0, high = experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_tiles[middle] <= tile)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/// The rows claimed by a pulling warp. Tickets 0, 1, 2, ... denote `together` rows each, spaced `warps` rows apart. The rows of
/// `warps` consecutive tickets form a contiguous stretch, in which the warps process neighboring rows at the same time.
struct PullOrder {
  int warps = 1, together = 1;
};
/// First row of a ticket's stretch; stretches are in ascending order of their tickets.
SWITCHYARD_INLINE int64_t pulled_stretch(const PullOrder& o, int ticket) {
  return int64_t{ticket / o.warps} * o.warps * o.together;
}
/// Row i of a ticket, i in [0, together).
SWITCHYARD_INLINE int64_t pulled_row(const PullOrder& o, int ticket, int i) {
  return pulled_stretch(o, ticket) + ticket % o.warps + int64_t{i} * o.warps;
}

/// Flags [first, first + count).
struct FlagRange {
  int64_t first = 0;
  int count = 0;
};
/// Flags that an up tile waits for: Site::layer_rows of its rows.
SWITCHYARD_INLINE FlagRange awaited_by_up(int64_t first_row, int rows) { return {first_row, rows}; }
/// Flags that a down tile of row tile `index` waits for: Site::layer_tiles for all columns of the up product.
SWITCHYARD_INLINE FlagRange awaited_by_down(int index, int up_columns) { return {int64_t{index} * up_columns, up_columns}; }
/// Flags that the return of row tiles [begin, end) waits for: Site::layer_tiles for all columns of the down product.
SWITCHYARD_INLINE FlagRange awaited_by_return(int begin, int end, int down_columns) {
  return {int64_t{begin} * down_columns, (end > begin ? end - begin : 0) * down_columns};
}
/// The flag of its product that a tile sets once its outputs are in memory. `columns`: number of column tiles of that product.
SWITCHYARD_INLINE int64_t flag_of_tile(int index, int columns, int column) { return int64_t{index} * columns + column; }

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Tiles of the fp8 kernel for many rows, and their order: pure functions of an expert's number of rows, for host and device.
//
// A cluster of two blocks computes a tile, each block up to 128 rows x one column tile (256 weights), in units of 64 rows. As
// long as an expert has more than 192 rows left, the blocks have 128 rows each and share the weights of one column tile. They
// share the rows of the remaining one to three units, one or two at a time, with neighboring column tiles. In both forms a
// block loads half of what both blocks need.
//
// Tickets number an expert's tiles in bands of at most kWideBand tiles that share weights; the last band also contains the
// tiles that share rows. Within a band, all tiles of two column tiles are consecutive, so their weights are read from memory
// once.
#pragma once

#include <cstdint>

#include "gemm/gpu/row_tiles.hpp"

namespace switchyard::detail {

inline constexpr int kWideUnit = 64, kWideBlockUnits = 2, kWideBand = 8;

/// A cluster's tile. Block b has units [first_unit + 2 b, first_unit + 2 b + 2) of `column_tile` if the blocks share weights,
/// else units [first_unit, first_unit + units) of column tile `column_tile` + b, which may be past the last one.
struct WideTile {
  int64_t first_unit = 0;
  int units = 0;  ///< of a block
  int column_tile = 0;
  bool shares_weights = false;
};

/// Tiles of an expert's rows: `whole` tiles share weights, and the `rests` tiles after them share rows.
struct WideRows {
  int64_t whole;
  int rest_units, rests;
};
SWITCHYARD_INLINE WideRows wide_rows(int64_t rows) {
  const int64_t units = (rows + kWideUnit - 1) / kWideUnit;
  const int rest = static_cast<int>(units % (2 * kWideBlockUnits));
  return {units / (2 * kWideBlockUnits), rest, (rest + kWideBlockUnits - 1) / kWideBlockUnits};
}

/// The same tiles as row tiles, in that order, for kernels that assign their own tickets. Tiles of at most kWideSharedRows rows
/// share rows, the others weights.
inline constexpr int kWideSharedRows = kWideBlockUnits * kWideUnit;
SWITCHYARD_INLINE int count_wide_row_tiles(int64_t rows) {
  const WideRows r = wide_rows(rows);
  return static_cast<int>(r.whole) + r.rests;
}
/// Row tile `index` of an expert with `rows` rows.
SWITCHYARD_INLINE RowTile wide_row_tile(int64_t rows, int index) {
  const WideRows r = wide_rows(rows);
  const int64_t rest = index - r.whole;
  const int64_t unit = rest < 0 ? int64_t{index} * 2 * kWideBlockUnits : r.whole * 2 * kWideBlockUnits + rest * kWideBlockUnits;
  const int64_t last = r.whole * 2 * kWideBlockUnits + r.rest_units, left = last - unit;
  const int64_t units = rest < 0 ? 2 * kWideBlockUnits : left < kWideBlockUnits ? left : kWideBlockUnits;
  const int64_t first = unit * kWideUnit, width = units * kWideUnit;
  return {first, static_cast<int>(width < rows - first ? width : rows - first), static_cast<int>(width)};
}
/// Whether the blocks of a cluster share the rows of a row tile of this width. The cluster's tile then covers two column tiles,
/// an even one and the next, and tickets of odd column tiles have no tile.
SWITCHYARD_INLINE bool shares_wide_rows(int width) { return width <= kWideSharedRows; }
SWITCHYARD_INLINE bool has_wide_tile(int width, int column_tile) { return !shares_wide_rows(width) || (column_tile & 1) == 0; }
/// Block `block`'s part of a cluster's tile: rows from `first` of the row tile on, `rows` of which exist, and a column tile,
/// which may be past the last one.
struct WidePart {
  int first, rows, width, column_tile;
};
SWITCHYARD_INLINE WidePart wide_part(int rows, int width, int column_tile, int block) {
  if (shares_wide_rows(width)) return {0, rows, width, column_tile + block};
  const int first = block * kWideSharedRows, left = rows - first;
  return {first, left < kWideSharedRows ? left : kWideSharedRows, kWideSharedRows, column_tile};
}
/// A row tile has kWideFlags flags per column tile. After storing its part, a block sets flags [first, first + count) of its
/// column tile: one if the blocks share weights; otherwise all, or none past the last column tile.
inline constexpr int kWideFlags = 2;
struct WideFlags {
  int first, count;
};
SWITCHYARD_INLINE WideFlags wide_flags(bool shares_weights, int column_tile, int column_tiles, int block) {
  if (shares_weights) return {block, 1};
  return {0, column_tile < column_tiles ? kWideFlags : 0};
}
/// Whether the block sets all flags of the cluster's tile. This is so if the blocks share rows, half of which each block loads,
/// and the other block's column tile is past the last one.
SWITCHYARD_INLINE bool sets_flags_alone(bool shares_weights, int column_tile, int column_tiles, int block) {
  return !shares_weights && block == 0 && column_tile + 1 == column_tiles;
}

/// Number of tickets of `whole` and `rests` tiles over all column tiles.
SWITCHYARD_INLINE int64_t wide_tickets(int64_t whole, int rests, int column_tiles) {
  return whole * column_tiles + int64_t{rests} * ((column_tiles + 1) / 2);
}
/// Number of tickets of an expert.
SWITCHYARD_INLINE int64_t count_wide_tiles(int64_t rows, int column_tiles) {
  const WideRows r = wide_rows(rows);
  return wide_tickets(r.whole, r.rests, column_tiles);
}

/// The tile of ticket `ticket`, which is less than count_wide_tiles().
SWITCHYARD_INLINE WideTile wide_tile(int64_t rows, int64_t ticket, int column_tiles) {
  const WideRows r = wide_rows(rows);
  // All bands but the last one are full.
  const int64_t bands = r.whole > 0 ? (r.whole + kWideBand - 1) / kWideBand : 1, full = int64_t{kWideBand} * column_tiles;
  const int64_t band = ticket / full < bands - 1 ? ticket / full : bands - 1;
  const bool last = band == bands - 1;
  const int64_t whole = last ? r.whole - band * kWideBand : kWideBand;
  const int rests = last ? r.rests : 0;
  const int64_t in_band = ticket - band * full, pair_tickets = 2 * whole + rests;
  const int64_t pair = in_band / pair_tickets, within = in_band - pair * pair_tickets;
  const int first_column = static_cast<int>(2 * pair);
  const int64_t sharing = first_column + 1 < column_tiles ? 2 * whole : whole;
  if (within < sharing) {
    const int second = within >= whole ? 1 : 0;
    const int64_t tile = band * kWideBand + within - second * whole;
    return {tile * 2 * kWideBlockUnits, kWideBlockUnits, first_column + second, true};
  }
  const int done = static_cast<int>(within - sharing) * kWideBlockUnits, left = r.rest_units - done;
  return {r.whole * 2 * kWideBlockUnits + done, left < kWideBlockUnits ? left : kWideBlockUnits, first_column, false};
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Divides the product of a grouped GEMM into tiles, and defines the order in which they are computed. Pure functions of the row
// counts, for host and device, so that kernels need no list of tiles.
//
// An expert's rows are divided into row tiles of nearly equal width, because a narrow tile costs as much memory traffic as a
// wide one. The width is a multiple of kRowStep and is limited by a kernel's registers. Tickets number the tiles by ascending
// expert and, within an expert, by bands of at most kBandTiles row tiles. Within a band, the row tiles of one column tile are
// consecutive. Its weights are thus read from memory once, while the rows of the band stay in the cache.
#pragma once

#include <cstdint>

#include "base/macros.hpp"

namespace switchyard::detail {

inline constexpr int kRowStep = 16, kBandTiles = 8;

/// Number of row tiles, each of at most `max` rows, for an expert with `rows` rows. `max` is a multiple of kRowStep.
SWITCHYARD_INLINE int count_row_tiles(int64_t rows, int max) { return static_cast<int>((rows + max - 1) / max); }

/// Rows [first, first + rows) of the expert; `width` is the number of rows computed: `rows` rounded up to kRowStep.
struct RowTile {
  int64_t first = 0;
  int rows = 0, width = 0;
};

/// Tile `index` of an expert with `rows` rows.
SWITCHYARD_INLINE RowTile row_tile(int64_t rows, int index, int max) {
  const int64_t steps = (rows + kRowStep - 1) / kRowStep;
  const int tiles = count_row_tiles(rows, max);
  const int64_t each = steps / tiles, longer = steps % tiles;
  const int width = static_cast<int>(kRowStep * (each + (index < longer ? 1 : 0)));
  const int64_t first = kRowStep * (each * index + (index < longer ? index : longer));
  return {first, static_cast<int>(width < rows - first ? width : rows - first), width};
}

/// Width of an expert's widest tile; 0 if it has no rows.
SWITCHYARD_INLINE int widest_row_tile(int64_t rows, int max) { return rows > 0 ? row_tile(rows, 0, max).width : 0; }

struct TilePlace {
  int row_tile = 0, column_tile = 0;
};

/// Position of ticket `ticket` within an expert, one of row_tiles * column_tiles. Bands are of nearly equal size, at most
/// `in_band`.
SWITCHYARD_INLINE TilePlace tile_place(int64_t ticket, int row_tiles, int column_tiles, int in_band = kBandTiles) {
  const int bands = (row_tiles + in_band - 1) / in_band;
  const int each = row_tiles / bands, longer = row_tiles % bands;
  const int64_t in_longer = static_cast<int64_t>(longer) * (each + 1) * column_tiles;
  const bool is_longer = ticket < in_longer;
  const int tiles = is_longer ? each + 1 : each;
  const int64_t at = is_longer ? ticket : ticket - in_longer;
  const int64_t band = at / (static_cast<int64_t>(tiles) * column_tiles);
  const int within = static_cast<int>(at - band * tiles * column_tiles);
  const int first = static_cast<int>(band) * tiles + (is_longer ? 0 : longer * (each + 1));
  return {first + within % tiles, within / tiles};
}

}  // namespace switchyard::detail

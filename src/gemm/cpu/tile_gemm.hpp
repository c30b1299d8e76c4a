// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM: a group is an expert, with its own weights B and its own rows A. Computes only tiles, without communication or
// scheduling across threads. A caller iterates over the tiles of all groups (for_each_tile) and computes each one
// (TileGemm::tile).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "gemm/aligned_buffer.hpp"
#include "gemm/cpu/onednn_gemm.hpp"

namespace switchyard::detail {

/// Number of rows in the largest tile. Larger tiles are not faster: weights are read once per tile, here 1 byte per 256
/// operations.
inline constexpr int64_t kTileRows = 256;

/// Smallest number of rows >= `rows` (in [1, kTileRows]) for which a tile exists. There are 27 such numbers, so at most 27
/// kernels are compiled per GEMM. A tile does at most one third more work than necessary; from 33 rows on, at most 23 % more.
constexpr int64_t padded_rows(int64_t rows) {
  const int64_t step = rows <= 2 ? 1 : rows <= 8 ? 2 : rows <= 32 ? 4 : rows <= 64 ? 8 : 16;
  return (rows + step - 1) / step * step;
}

/// Number of rows in the next tile of a group with `left` >= 1 rows remaining. The tiles of a group are of about equal size,
/// because a short last tile would read all weights for only a few rows.
constexpr int64_t next_tile_rows(int64_t left) {
  const int64_t tiles = (left + kTileRows - 1) / kTileRows;
  return std::min(padded_rows((left + tiles - 1) / tiles), left);
}

/// Calls `visit(group, first, rows)` for tiles that cover rows 0 .. num_rows[group] - 1 of each group, with groups and rows in
/// ascending order.
template <class Visit>
void for_each_tile(std::span<const int64_t> num_rows, Visit&& visit) {
  for (size_t group = 0; group < num_rows.size(); ++group) {
    for (int64_t first = 0, left = num_rows[group]; left > 0;) {
      const int64_t rows = next_tile_rows(left);
      visit(static_cast<int>(group), first, rows);
      first += rows;
      left -= rows;
    }
  }
}

struct ShareWeights {};

/// `C = A * B_group^T`, where each group has bf16 weights B_group [n, k]. Not thread-safe: use an object from one thread at a
/// time.
class TileGemm {
 public:
  TileGemm(int num_groups, int64_t n, int64_t k, WeightStorage storage);
  /// Constructor for another thread: reads the weights of `owner`, which must already be packed or bound, must not change, and
  /// must outlive this object.
  TileGemm(const TileGemm& owner, ShareWeights);

  /// WeightStorage::packed: copies one group's weights, bf16 [n, k].
  void pack(int group, const uint16_t* b);
  /// WeightStorage::view: uses the weights of all groups, bf16 [num_groups, n, k], which must outlive the tiles.
  void bind(const uint16_t* b) { bound_ = b; }

  /// Computes one tile on the calling thread: c (float32 [m, n]) = a (bf16 [m, k]) * B_group^T. m is a value returned by
  /// padded_rows(). Padding rows are read and written like the others; all rows are independent of each other.
  void tile(int group, const uint16_t* a, int64_t m, float* c);

  /// Bytes used by such an object's own weights and scratch; an object that shares weights needs only the scratch. Keeps no
  /// memory allocated.
  static ExpertMemory memory_required(int num_groups, int64_t n, int64_t k, WeightStorage storage);
  ExpertMemory memory() const { return {weights_.bytes(), engine_.scratch_bytes()}; }
  std::string implementation() const { return engine_.implementation(); }

 private:
  const void* weights(int group) const;

  int64_t n_, k_;
  WeightStorage storage_;
  OnednnGemm engine_;
  size_t group_bytes_;     // packed weights of one group
  AlignedBuffer weights_;  // empty if they are shared
  const std::byte* packed_ = nullptr;
  const uint16_t* bound_ = nullptr;
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Sizes of the fused layer on GPUs, for host and device, and its private memory on both backends.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/carver.hpp"
#include "layout/fused_layout.hpp"
#include "switchyard/fused.hpp"

namespace switchyard::detail {

/// Rows of the widest tile: what the rows that travel leave of a block's shared memory.
inline constexpr int kFusedRows = 176;
/// A row travels in pieces of at most so many bytes, each through one of kPieces buffers of a block.
inline constexpr uint32_t kPieceBytes = 7168, kPieces = 2;
/// Rows of a tile that are sent to their owners together.
inline constexpr int kRowsAtOnce = 16;
/// Outputs of a tile up, and down.
inline constexpr int kUpColumns = 128, kDownColumns = 256;
inline constexpr int kMostFusedExperts = 4608;  ///< the plan's most

/// Carves `base`, or only counts the bytes if it is null. `here`: experts of the rank.
inline int64_t carve_fused(std::byte* base, const FusedMoeConfig& c, int64_t rows, int here, FusedMemory& m) {
  constexpr int64_t kElement = 2;
  const int64_t tiles = rows / kFusedRows + here;
  Carver carver(base);
  carver.take(m.counters, 1);
  carver.take(m.arrived, rows);
  carver.take(m.h_done, tiles * ((c.intermediate + kUpColumns - 1) / kUpColumns));
  carver.take(m.y_done, tiles * ((c.hidden + kDownColumns - 1) / kDownColumns));
  m.flags = carver.bytes();
  carver.take(m.x_rows, rows * c.hidden * kElement);
  carver.take(m.h, rows * c.intermediate * kElement);
  carver.take(m.y, rows * c.hidden * kElement);
  return carver.bytes();
}

/// The same on the CPU, where a product has one column tile, and a row tile one row or more.
inline int64_t carve_fused_on_cpu(std::byte* base, const FusedMoeConfig& c, int64_t rows, FusedMemory& m) {
  constexpr int64_t kElement = 2;
  Carver carver(base);
  carver.take(m.counters, 1);
  for (uint64_t** const flags : {&m.arrived, &m.h_done, &m.y_done}) carver.take(*flags, rows);
  m.flags = carver.bytes();
  carver.take(m.x_rows, rows * c.hidden * kElement);
  carver.take(m.h, rows * c.intermediate * kElement);
  carver.take(m.y, rows * c.hidden * kElement);
  return carver.bytes();
}

}  // namespace switchyard::detail

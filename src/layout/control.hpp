// SPDX-License-Identifier: Apache-2.0
// Shared buffers of normal mode, described once for host and device. Each rank holds one control region at the same heap
// offset.
#pragma once

#include <cstdint>

#include "layout/addressing.hpp"
#include "layout/heap_view.hpp"
#include "layout/sites.hpp"

namespace switchyard::detail {

/// Where a rank takes or offers rows in one call: byte offsets into its own segment.
struct Placement {
  uint64_t rows;     ///< OutputLayout base (dispatch) or expert-output rows (combine)
  uint64_t weights;  ///< combine, rank-major with weights: float32 [records, K]; combine, expert-major per_route: rows [T * K]
                     ///< that others push; dispatch: 1 if this rank sends weights
  int64_t rows_allocated;
  int64_t records_allocated;
  uint64_t status;     ///< 0, or an ErrorCode: this rank cannot take part and all ranks end the call with that error
  uint64_t signature;  ///< of the call (mode, shape, options); equal on all ranks
  uint64_t records;    ///< dispatch: RecordLayout base; combine: 1 if `rows` lie ready, so that no `outputs` follows
  uint64_t memory;     ///< combine: 0 if `rows` lie in the heap, or 1 + the slot of the registration they lie in
};
static_assert(sizeof(Placement) == 64);

/// Head of a counts row; then int32 touching[W], routes[E].
struct CountsHead {
  uint64_t signature;
  int64_t tokens;
  int64_t capacity;
  uint64_t sends_weights;  ///< CUDA: 1 if this rank's records carry weights (the CPU says it in its placement)
};

/// Byte layout of the control region. Flags have a cache line each. Rows that a peer writes are double buffered by the parity
/// of the call: a peer can be at most one call ahead, because every call waits for a flag that each peer sets in that call.
struct ControlLayout {
  static constexpr int64_t kLine = 64;
  static constexpr int kMostChunks = kLine / 8;  ///< words of a flag's line

  uint64_t base = 0;  ///< heap offset
  int world = 1;
  int experts = 0;

  SWITCHYARD_FN int64_t counts_row_bytes() const {
    return round_up(static_cast<int64_t>(sizeof(CountsHead)) + 4 * (world + experts), kLine);
  }
  SWITCHYARD_FN int64_t flags_bytes() const { return kNumControlSites * world * kLine; }
  SWITCHYARD_FN int64_t placements_bytes() const { return 2 * world * static_cast<int64_t>(sizeof(Placement)); }
  SWITCHYARD_FN int64_t bytes() const { return flags_bytes() + placements_bytes() + 2 * world * counts_row_bytes(); }

  /// Flag of `site`, one of SWITCHYARD_CONTROL_SITE, in the reader's segment that rank `writer` sets.
  SWITCHYARD_FN SymPtr<uint64_t> flag(Site site, int writer) const {
    const int64_t line = static_cast<int64_t>(control_row(site)) * world + writer;
    return {base + static_cast<uint64_t>(line * kLine)};
  }
  /// Site::rows has a word per chunk of the source's tokens, in one line; Site::outputs one per chunk of the reader's.
  SWITCHYARD_FN SymPtr<uint64_t> rows_flag(int writer, int chunk) const { return flag(Site::rows, writer) + chunk; }
  SWITCHYARD_FN SymPtr<uint64_t> outputs_flag(int writer, int chunk) const { return flag(Site::outputs, writer) + chunk; }
  SWITCHYARD_FN SymPtr<Placement> placement(uint64_t epoch, int writer) const {
    const int64_t index = static_cast<int64_t>(epoch & 1) * world + writer;
    return {base + static_cast<uint64_t>(flags_bytes() + index * static_cast<int64_t>(sizeof(Placement)))};
  }
  SWITCHYARD_FN SymPtr<CountsHead> counts_head(uint64_t epoch, int writer) const {
    const int64_t index = static_cast<int64_t>(epoch & 1) * world + writer;
    return {base + static_cast<uint64_t>(flags_bytes() + placements_bytes() + index * counts_row_bytes())};
  }
};

/// Byte layout of the rows of one dispatch output; offsets from the block's start.
struct OutputLayout {
  int64_t rows = 0;  ///< allocated
  int64_t row_bytes = 0;
  int64_t scale_bytes = 0;

  SWITCHYARD_FN int64_t scales_at() const { return round_up(rows * row_bytes, 128); }
  SWITCHYARD_FN int64_t bytes() const { return scales_at() + round_up(rows * scale_bytes, 128); }
};

/// Byte layout of the records of one dispatch: per record its token, its routes and their weights. Cached dispatch moves none.
struct RecordLayout {
  int64_t records = 0;  ///< allocated
  int topk = 0;

  SWITCHYARD_FN int64_t token_at() const { return 0; }
  SWITCHYARD_FN int64_t route_at() const { return round_up(records * 4, 128); }
  SWITCHYARD_FN int64_t weight_at() const { return route_at() + round_up(records * topk * 4, 128); }
  SWITCHYARD_FN int64_t bytes() const { return weight_at() + round_up(records * topk * 4, 128); }
};

}  // namespace switchyard::detail

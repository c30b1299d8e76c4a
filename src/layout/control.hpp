// SPDX-License-Identifier: Apache-2.0
// Shared buffers of normal mode, defined once for host and device. Each rank has one control region at the same heap offset.
#pragma once

#include <cstdint>

#include "layout/addressing.hpp"
#include "layout/heap_view.hpp"
#include "layout/sites.hpp"

namespace switchyard::detail {

/// Offer for a dispatch: in addition to its rows (an OutputLayout), a rank receives records (a RecordLayout).
struct DispatchOffer {
  uint64_t records;  ///< byte offset into the rank's segment
  int64_t rows_allocated;
  int64_t records_allocated;
  uint32_t sends_weights;  ///< CPU: 1 if this rank's records carry weights (CUDA sends this with its counts)
  uint32_t copies_out;     ///< 1 if this rank copies rows as they arrive, so that sources announce them in chunks
};
/// Offer for a combine of rank-major rows, or a per_rank combine of expert-major rows, whose sums are staged; owners read one
/// row per record.
struct PullOffer {
  uint64_t ready;          ///< 1 if the rows are ready, so that no `outputs` follows
  uint64_t weights;        ///< byte offset of float32 [records, K], if gives_weights; direct staging only
  uint64_t gives_weights;  ///< 1 if the caller passed weights of rank-major rows
  uint64_t takes_weights;  ///< 1 if the caller requests their sums, which return with rows from other hosts
};
/// Offer for a per_route combine of expert-major rows.
struct RouteOffer {
  uint64_t in_place;  ///< 1 if owners read the rows in place, 0 if this rank pushes them
  uint64_t inbox;     ///< byte offset of rows [T * K] that others push
  uint64_t unused[2];
};

/// The memory that a rank offers in one call, sent to every rank in a single message. The kind of call, which is part of the
/// signature, selects the valid view. A rank that cannot take part, or offers no memory (ring staging), leaves the offsets 0.
struct Placement {
  uint64_t status;     ///< 0, or an ErrorCode: this rank cannot take part and all ranks end the call with that error
  uint64_t signature;  ///< of the call (mode, shape, options); identical on all ranks
  uint64_t rows;       ///< rows that it receives (dispatch) or offers (combine): byte offset into its segment
  uint64_t memory;     ///< 0 if they are in the heap, or 1 + the slot of their registration (combine)
  union {
    DispatchOffer dispatch;
    PullOffer pull;
    RouteOffer route;
  };
};
static_assert(sizeof(Placement) == 64 && sizeof(DispatchOffer) == 32 && sizeof(PullOffer) == 32 && sizeof(RouteOffer) == 32);

/// Header of a counts row, followed by int32 touching[W], routes[E].
struct CountsHead {
  uint64_t signature;
  int64_t tokens;
  int64_t capacity;
  uint64_t sends_weights;  ///< CUDA: 1 if this rank's records carry weights (the CPU sends this in its placement)
};

/// Byte layout of the control region. Each flag has its own cache line. Rows written by a peer are double-buffered by the
/// parity of the call: a peer can be at most one call ahead, because every call waits for a flag that each peer sets in that
/// call.
struct ControlLayout {
  static constexpr int64_t kLine = 64;
  static constexpr int kMaxChunks = kLine / 8;  ///< words in a flag's line

  uint64_t base = 0;  ///< heap offset
  int world = 1;
  int experts = 0;

  SWITCHYARD_FN int64_t counts_row_bytes() const {
    return round_up(static_cast<int64_t>(sizeof(CountsHead)) + 4 * (world + experts), kLine);
  }
  SWITCHYARD_FN int64_t flags_bytes() const { return kNumControlSites * world * kLine; }
  SWITCHYARD_FN int64_t placements_bytes() const { return 2 * world * static_cast<int64_t>(sizeof(Placement)); }
  SWITCHYARD_FN int64_t bytes() const { return flags_bytes() + placements_bytes() + 2 * world * counts_row_bytes(); }

  /// Flag of `site`, one of the SWITCHYARD_CONTROL_SITE entries, in the reader's segment, set by rank `writer`.
  SWITCHYARD_FN SymPtr<uint64_t> flag(Site site, int writer) const {
    const int64_t line = static_cast<int64_t>(control_row(site)) * world + writer;
    return {base + static_cast<uint64_t>(line * kLine)};
  }
  /// Site::rows has one word per chunk of the source's tokens, all in one line; Site::outputs has one per chunk of the reader's
  /// tokens.
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

/// Byte layout of the rows of one dispatch output; offsets are relative to the start of the block.
struct OutputLayout {
  int64_t rows = 0;  ///< allocated
  int64_t row_bytes = 0;
  int64_t scale_bytes = 0;

  SWITCHYARD_FN int64_t scales_at() const { return round_up(rows * row_bytes, 128); }
  SWITCHYARD_FN int64_t bytes() const { return scales_at() + round_up(rows * scale_bytes, 128); }
};

/// Byte layout of the records of one dispatch: the token, routes and weights of each record. Cached dispatch moves none.
struct RecordLayout {
  int64_t records = 0;  ///< allocated
  int topk = 0;

  SWITCHYARD_FN int64_t token_at() const { return 0; }
  SWITCHYARD_FN int64_t route_at() const { return round_up(records * 4, 128); }
  SWITCHYARD_FN int64_t weight_at() const { return route_at() + round_up(records * topk * 4, 128); }
  SWITCHYARD_FN int64_t bytes() const { return weight_at() + round_up(records * topk * 4, 128); }
};

}  // namespace switchyard::detail

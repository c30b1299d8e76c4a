// SPDX-License-Identifier: Apache-2.0
// What low-latency mode must deliver, from its definition: who chose an expert, in which order, where its scales lie. Sums are
// combine_row's (oracle/rows.hpp). Shares no code with src/.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/routing.hpp"
#include "oracle/rows.hpp"
#include "switchyard/low_latency.hpp"

namespace oracle {

/// A delivered row: the token, and the first of its choices that is the expert.
struct Arrival {
  int source = 0;
  int64_t token = 0;
  int k = 0;
  int64_t packed() const;  ///< LowLatencyOutput::row_source
};

/// What one rank gets. Of the problem's fields world, experts, topk, max_tokens and ids are used.
struct LowLatencyView {
  int64_t rows_per_expert = 0;                 ///< R
  std::vector<std::vector<Arrival>> arrivals;  ///< per local expert, in order
  std::vector<int32_t> rows_of_expert;         ///< [experts here]
  std::vector<int64_t> source_range;           ///< [experts here, W]
};
LowLatencyView low_latency_view(const Problem& problem, int rank);

/// Rows that one rank sends, to itself and to the others.
struct Traffic {
  uint64_t local = 0, remote = 0;
};
/// In a dispatch: one per (token, rank) or per (token, expert).
Traffic dispatch_traffic(const Problem& problem, int rank, switchyard::Sending sending);
/// In a combine of what that dispatch delivered: one per (token, expert) or per (token, rank), by the rank of the expert.
Traffic combine_traffic(const Problem& problem, int rank, CombineOrder order);
/// Rows of a rank's tokens that cross between hosts. In a dispatch: one per (token, other host with a route). `host_of`: by
/// rank.
uint64_t dispatch_crossings(const Problem& problem, int rank, const std::vector<int>& host_of);
/// In a combine of what that dispatch delivered: as combine_traffic, of ranks of other hosts.
uint64_t combine_crossings(const Problem& problem, int rank, CombineOrder order, const std::vector<int>& host_of);

/// Byte offset of scale `group` of row `row` of local expert `expert` in Rows::scales. `row_scales`: columns per scale.
struct ScaleShape {
  switchyard::ScaleOrder order = switchyard::ScaleOrder::row_major;
  ScaleKind kind = ScaleKind::f32;
  int64_t hidden = 0;
  int row_scales = switchyard::kScaleGroup;
  int64_t rows_per_expert = 0;
  int64_t groups() const;
  /// Groups that have a place: beyond groups() they are 0.
  int64_t places() const;
  /// LowLatencyOutput::scale_rows: column-major, words from a column to the next, whole 16 bytes; row-major, rows_per_expert.
  int64_t column() const;
  int64_t offset(int64_t expert, int64_t row, int64_t group) const;
};

/// Bound of |combine - exact sum| of one element, from the exact terms w_k * x_k by k and the rank of each:
/// docs/concepts/low_latency.md. Neither order may overflow.
struct ErrorBound {
  double exact = 0;      ///< the sum
  double per_route = 0;  ///< of |per_route - exact|
  double per_rank = 0;   ///< of |per_rank - exact|
};
ErrorBound error_bound(DType type, int world, const std::vector<double>& terms, const std::vector<int>& ranks);

}  // namespace oracle

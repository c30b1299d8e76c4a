// SPDX-License-Identifier: Apache-2.0
// Expected results of low-latency mode, by definition: the tokens that chose an expert, their order, and the positions of their
// scales. Sums are computed by combine_row (oracle/rows.hpp). Shares no code with src/.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/routing.hpp"
#include "oracle/rows.hpp"
#include "switchyard/low_latency.hpp"

namespace oracle {

/// A delivered row: its token, and the first of the token's choices that names the expert.
struct Arrival {
  int source = 0;
  int64_t token = 0;
  int k = 0;
  int64_t packed() const;  ///< LowLatencyOutput::row_source
};

/// Data received by one rank. Uses the problem's fields world, experts, topk, max_tokens and ids.
struct LowLatencyView {
  int64_t rows_per_expert = 0;                 ///< R
  std::vector<std::vector<Arrival>> arrivals;  ///< per local expert, in order
  std::vector<int32_t> rows_of_expert;         ///< [local experts]
  std::vector<int64_t> source_range;           ///< [local experts, W]
};
LowLatencyView low_latency_view(const Problem& problem, int rank);

/// Number of rows that one rank sends to itself and to other ranks.
struct Traffic {
  uint64_t local = 0, remote = 0;
};
/// Traffic of a dispatch: one row per (token, rank) or per (token, expert).
Traffic dispatch_traffic(const Problem& problem, int rank, switchyard::Sending sending);
/// Traffic of a combine after that dispatch: one row per (token, expert) or per (token, rank), counted at the expert's rank.
Traffic combine_traffic(const Problem& problem, int rank, CombineOrder order);
/// Number of rows of a rank's tokens that cross between hosts in a dispatch: one per (token, other host with a route).
/// `host_of`: host of each rank.
uint64_t dispatch_crossings(const Problem& problem, int rank, const std::vector<int>& host_of);
/// Number of rows that cross between hosts in a combine after that dispatch: as combine_traffic counts them, but only to ranks
/// on other hosts.
uint64_t combine_crossings(const Problem& problem, int rank, CombineOrder order, const std::vector<int>& host_of);

/// Byte offset in Rows::scales of scale `group` for row `row` of local expert `expert`. `row_scales`: columns per scale.
struct ScaleShape {
  switchyard::ScaleOrder order = switchyard::ScaleOrder::row_major;
  ScaleKind kind = ScaleKind::f32;
  int64_t hidden = 0;
  int row_scales = switchyard::kScaleGroup;
  int64_t rows_per_expert = 0;
  int64_t groups() const;
  /// Number of stored groups. Scales for groups beyond groups() are 0.
  int64_t places() const;
  /// LowLatencyOutput::scale_rows. Column-major: number of words from one column to the next, padded to a multiple of 16 bytes.
  /// Row-major: rows_per_expert.
  int64_t column() const;
  int64_t offset(int64_t expert, int64_t row, int64_t group) const;
};

/// Bound of |combine - exact sum| for one element, computed from the exact terms w_k * x_k by k and the rank of each; see
/// docs/concepts/low_latency.md. Neither order may overflow.
struct ErrorBound {
  double exact = 0;      ///< the sum
  double per_route = 0;  ///< bound of |per_route - exact|
  double per_rank = 0;   ///< bound of |per_rank - exact|
};
ErrorBound error_bound(DType type, int world, const std::vector<double>& terms, const std::vector<int>& ranks);

}  // namespace oracle

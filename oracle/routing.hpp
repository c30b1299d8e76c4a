// SPDX-License-Identifier: Apache-2.0
// Expected results of a dispatch, by definition: all routes in order, with their positions and counts. Shares no code with
// src/.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/types.hpp"

namespace oracle {

using switchyard::Layout;
using switchyard::Overflow;
using switchyard::SizePolicy;

/// Experts are split into consecutive ranges; the first E mod W ranks hold one more. Returns E for rank == world.
int first_expert(int experts, int world, int rank);
int owner(int experts, int world, int64_t expert);

/// One dispatch, described globally by the inputs of all ranks.
struct Problem {
  int world = 1;
  int experts = 1;
  int topk = 1;
  int64_t max_tokens = 0;
  Layout layout = Layout::rank_major;
  int alignment = 1;
  SizePolicy size = SizePolicy::exact;
  std::vector<int64_t> capacity;  ///< [W], SizePolicy::capacity
  Overflow overflow = Overflow::fail;
  std::vector<std::vector<int64_t>> ids;    ///< per rank [T, K]; -1 or any invalid value outside [0, E): no expert
  std::vector<std::vector<float>> weights;  ///< per rank [T, K], or empty: without weights

  int64_t tokens(int rank) const { return static_cast<int64_t>(ids[static_cast<size_t>(rank)].size()) / topk; }
  int64_t id(int rank, int64_t token, int k) const {
    return ids[static_cast<size_t>(rank)][static_cast<size_t>(token * topk + k)];
  }
  bool valid(int64_t id) const { return id >= 0 && id < experts; }
  int first_expert(int rank) const { return oracle::first_expert(experts, world, rank); }
  int owner(int64_t expert) const { return oracle::owner(experts, world, expert); }
};

/// One (token, expert) choice.
struct Route {
  int source = 0;
  int64_t token = 0;
  int k = 0;
  int expert = 0;
  int dest = 0;
  int64_t slot = -1;  ///< row at dest, before capacity
  bool kept = true;
};

/// Origin of one delivered row; source -1 marks padding. k is -1 for rank-major rows.
struct Origin {
  int source = -1;
  int64_t token = -1;
  int k = -1;
};

/// One (token, rank) pair at its receiver.
struct Record {
  int source = 0;
  int64_t token = 0;
};

/// A token's routes to one rank.
struct Send {
  int rank;
  int64_t row;     ///< row of the first kept route; -1 if none was kept (expert-major)
  int64_t record;  ///< index of the pair at `rank`
};

/// One rank's view as a receiver. Dispatched and HandleData have the same fields and document their sizes.
struct Received {
  int64_t rows = 0;
  int64_t rows_needed = 0;                ///< before capacity
  std::vector<Origin> origin;             ///< [rows]
  std::vector<int32_t> topk_ids;          ///< [rows, K] rank-major
  std::vector<float> topk_weights;        ///< [rows, K] rank-major, with weights
  std::vector<int64_t> row_source;        ///< [rows] expert-major
  std::vector<float> row_weights;         ///< [rows] expert-major, with weights
  std::vector<int64_t> expert_first_row;  ///< [local experts] expert-major
  std::vector<int64_t> tokens_per_expert, aligned_per_expert;
  std::vector<int64_t> dropped_per_source;  ///< [W, local experts]; empty unless drop_and_report
  std::vector<Record> records;
  std::vector<int32_t> record_route;  ///< [records, K]
  std::vector<float> record_weight;   ///< [records, K], with weights
};

/// One rank's view as the owner of its tokens.
struct Owned {
  std::vector<int32_t> kept_ids;         ///< [T, K]
  std::vector<int32_t> route_row;        ///< [T, K]
  std::vector<int32_t> route_record;     ///< [T, K]; expert-major: also for routes dropped at capacity
  std::vector<uint8_t> dropped;          ///< [T, K]; empty unless drop_and_report
  std::vector<std::vector<Send>> sends;  ///< per token, ranks ascending
};

/// The views of one rank: all routes are read but only the rank's are kept. Under Overflow::fail, capacity is ignored.
Received received(const Problem& problem, int rank);
Owned owned(const Problem& problem, int rank);
/// Number of the rank's ids that are neither -1 nor in [0, E).
int64_t invalid_ids(const Problem& problem, int rank);
/// Received::origin before capacity: the rows that `rank` must receive, in order.
std::vector<Origin> rows_to(const Problem& problem, int rank);

struct RankView : Received, Owned {};

/// Views and totals of all ranks.

struct Expected {
  bool capacity_exceeded = false;  ///< under Overflow::fail: the call must fail on all ranks
  bool any_dropped = false;
  std::vector<Route> routes;  ///< all, by (source, token, k)
  std::vector<RankView> ranks;
  std::vector<std::vector<int32_t>> routes_per_expert;  ///< S [W][E]
  std::vector<std::vector<int32_t>> touching;           ///< D [W][W]
};
Expected expect(const Problem& problem);

/// Maximum number of rows of `rank` over all possible routings.
int64_t worst_case_rows(const Problem& problem, int rank);

}  // namespace oracle

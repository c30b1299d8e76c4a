// SPDX-License-Identifier: Apache-2.0
// Plan: routing -> addresses. Two steps: `LocalPlan` needs only this rank's ids; `HandleData` also needs the counts of all
// ranks. Slots are not allocated dynamically: every row index is the sum of a prefix of counts and a stable index, so results
// do not depend on timing.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/invalid_routes.hpp"
#include "layout/addressing.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

/// Results derived only from one rank's ids. Route f = t * K + k.
struct LocalPlan {
  ExpertRanges map;
  int topk = 0;
  int64_t tokens = 0;
  std::vector<int32_t> ids;           ///< [T * K] expert, or -1 (any id outside [0, E))
  std::vector<int32_t> expert_index;  ///< [T * K] number of earlier routes of this rank to the same expert (stable index), -1
  std::vector<int32_t> rank_index;    ///< [T * K] number of earlier tokens of this rank that go to the expert's rank, -1
  std::vector<int32_t> tokens_per_rank;    ///< [W]
  std::vector<int32_t> routes_per_expert;  ///< [E]
  InvalidRoutes invalid;

  /// Reuses the vectors' memory. O(T * K + E + W).
  void build(const ExpertIds& ids, int num_experts, int world);
};

/// The counts gathered from all ranks.
struct GatheredCounts {
  int world = 0;
  int experts = 0;
  std::vector<int32_t> routes;    ///< [W, E] S: routes of source s to expert e
  std::vector<int32_t> touching;  ///< [W, W] D: tokens of source s that go to rank d
  std::vector<int64_t> tokens;    ///< [W] T of each rank
  std::vector<int64_t> capacity;  ///< [W] maximum output rows of rank d; INT64_MAX if unbounded

  int32_t s(int source, int expert) const {
    return routes[static_cast<size_t>(source) * static_cast<size_t>(experts) + static_cast<size_t>(expert)];
  }
  int32_t d(int source, int dest) const {
    return touching[static_cast<size_t>(source) * static_cast<size_t>(world) + static_cast<size_t>(dest)];
  }
  /// Number of tokens that go to rank `dest` from all sources before `source`.
  int64_t touching_before(int source, int dest) const;
  /// Number of output rows that rank `dest` needs, before any capacity: received rows for rank-major, padded rows for
  /// expert-major.
  int64_t rows_needed(Layout layout, int alignment, int dest) const;
  /// Expert-major: first row of every expert on `dest`, followed by the total (padded). [experts of dest + 1].
  void expert_first_rows(int alignment, int dest, std::vector<int64_t>& out) const;
};

/// One payload transfer for a token: to row `row` on `rank`, where its record has index `record`. `row` is -1 if all of the
/// token's routes to that rank were dropped at capacity; in that case, only the record is sent.
struct SendEntry {
  int32_t rank;
  int32_t row;
  int32_t record;
};

/// Send entries of all tokens in the form read by kernels: ranges [begin[t], begin[t + 1]) or, without `begin`, `stride` places
/// per token, with rank -1 after the last entry.
struct SendTable {
  const SendEntry* entries = nullptr;
  const int64_t* begin = nullptr;
  int stride = 0;

  SWITCHYARD_FN const SendEntry* of(int64_t t) const { return entries + (begin ? begin[t] : t * stride); }
  SWITCHYARD_FN int places(int64_t t) const { return begin ? static_cast<int>(begin[t + 1] - begin[t]) : stride; }
};

struct HandleData;
struct HostTables;

/// A handle's tables in GPU memory.
class DeviceHandle {
 public:
  virtual ~DeviceHandle() = default;
  /// The handle's routing in host memory. Waits for the dispatch that creates it; copies once.
  virtual const HandleData& host() const = 0;
};

/// All data that both directions need. If `device` is set, only the shape (up to `map`) and the allocated sizes are filled in
/// here, and `rows` is -1 until known; host_data() returns the rest. A record describes one (token, rank) pair at the receiver.
/// Its index `record` is a prefix of D over the sources plus rank_index, so records are ordered by (source rank, token);
/// rank-major rows are records.
struct HandleData {
  std::shared_ptr<DeviceHandle> device;
  // Shape.
  Layout layout = Layout::rank_major;
  int alignment = 1;
  int rank = 0;
  int topk = 0;
  int64_t tokens = 0;
  int64_t max_tokens = 0;
  int64_t hidden = 0;
  uint64_t identity = 0;       ///< of the call that made it, equal on all its ranks: calls with handles compare it
  int64_t invalid_ids = 0;     ///< routes of this rank with ids that are neither -1 nor an expert
  bool reports_drops = false;  ///< made with Overflow::drop_and_report: `dropped` and `local_dropped` have their full length
  GatheredCounts counts;
  ExpertRanges map;

  // Owner side (this rank's tokens).
  std::vector<int32_t> ids;           ///< [T * K] expert or -1; -1 also if the route was dropped at capacity
  std::vector<int32_t> route_row;     ///< [T * K] row at the expert's rank: expert-major slot or rank-major row; -1 if none
  std::vector<int32_t> route_record;  ///< [T * K] record at the expert's rank, -1 if none
  std::vector<int64_t> send_begin;    ///< [T + 1] range in `sends` of each token; ranks ascend within a token
  std::vector<SendEntry> sends;
  std::vector<float> weights;    ///< [T * K] as passed to dispatch, or empty
  std::vector<uint8_t> dropped;  ///< [T * K] 1 = dropped at capacity; empty unless reports_drops

  // Receiver side.
  int64_t rows = 0;            ///< rows delivered here, padding included
  int64_t rows_allocated = 0;  ///< rows of the output (static sizes: more than `rows`)
  int64_t num_records = 0;     ///< records received
  int64_t records_allocated = 0;
  std::vector<int32_t> record_token;  ///< [records_allocated] source token, -1 beyond num_records
  std::vector<int32_t> record_route;  ///< [records_allocated * K] rank-major: local expert; expert-major: row; -1 if elsewhere
  std::vector<float> record_weight;   ///< [records_allocated * K] 0 where record_route is -1; empty without weights
  std::vector<int64_t> row_source;    ///< expert-major: [rows_allocated] pack_source, -1 for padding
  std::vector<float> row_weight;      ///< expert-major with weights: [rows_allocated]
  std::vector<int64_t> first_row;     ///< expert-major: [experts here]
  std::vector<int64_t> kept_per_expert;     ///< [experts here] routes kept
  std::vector<int64_t> aligned_per_expert;  ///< [experts here]
  std::vector<int64_t> local_dropped;       ///< [W * experts here], empty unless reports_drops

  std::shared_ptr<HostTables> hosts;  ///< traffic between hosts (plan/hosts.hpp); null: none possible, or deserialized
};

/// `h` with all its tables in host memory.
inline const HandleData& host_data(const HandleData& h) { return h.device ? h.device->host() : h; }

/// Fills the owner side of `h` and its receiver-side sizes from the local plan and the gathered counts (already in h.counts),
/// applying each destination's capacity. O(W * E + T * K). Before the call, the caller must set `reports_drops`, without which
/// no route may exceed a capacity; it must also set `rows_allocated` and `records_allocated`.
void build_owner_side(const LocalPlan& local, HandleData& h);

/// The receiver's part of build_owner_side(): sets `rows`, `num_records` and `first_row` from the counts.
void place_local_rows(HandleData& h);

/// [W + 1] kept records on this rank, by source.
std::vector<int64_t> record_ranges(const HandleData& h);
/// Expert-major: [local experts, 2] ranges of the rows without a source, which follow each expert's rows. Rank-major: none.
std::vector<int64_t> padding_ranges(const HandleData& h);

/// Call after all records have arrived (record_token, record_route, record_weight): fills row_source, row_weight,
/// kept_per_expert, aligned_per_expert and local_dropped. O(records * K).
void build_receiver_side(HandleData& h);

}  // namespace switchyard::detail

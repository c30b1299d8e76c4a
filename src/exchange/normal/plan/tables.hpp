// SPDX-License-Identifier: Apache-2.0
// GPU memory of normal mode: the state of an object and the tables of a handle. Shared by host and device code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/carver.hpp"
#include "layout/control.hpp"
#include "plan/plan.hpp"
#include "protocol/normal/chunks.hpp"

namespace switchyard::detail {

/// State of one exchange object. The kernels of a call use the successor of `epoch` as the call's epoch; the last warp of the
/// last kernel stores it. Counters are 0 between launches.
struct ObjectState {
  uint64_t epoch;
  uint64_t plan_arrivals;  ///< blocks of the plan kernel
  uint64_t sends_done[kRowChunks], sums_done[kSumChunks], pulls_done, exits;
  uint64_t sends_next, places_next, sums_next, pulls_next;  ///< counters of protocol/work_queue.hpp
  uint64_t plan_begin_ns, plan_end_ns;  ///< of the last plan kernel: begin of its first block, end of its last block
  // Another rank had no room in a call, and its own host detected this at once. Until the host of this rank has detected it
  // too, calls do nothing on this rank, because the other rank may not be making any of them.
  uint64_t halted_by;  ///< number of that fault on this rank, from 1; 0: none
  uint64_t halted_epoch;
  int32_t halted_code, halted_rank;
  uint64_t verdict, leavers;  ///< of the current call, while halted: whether it runs; number of blocks that have left
  uint64_t passes;            ///< fused layer, Overflow::split: number of passes of the call; 0: it is not split
};
enum class Verdict : uint64_t { none, proceeds, is_skipped };
/// Outcome of a block's checks at the beginning of a call: takes_part (the call runs), resumes (it runs, and the object is no
/// longer halted), left_out (it does nothing because the object is halted) or unmoved (it does nothing because the dispatch
/// that made its handle moved nothing).
enum class Participation : uint32_t { takes_part, resumes, left_out, unmoved };

inline constexpr size_t kObjectStateBytes = 256;  ///< reserved size of ObjectState
static_assert(sizeof(ObjectState) <= kObjectStateBytes);

/// TablesHeader::status of a plan of the fused layer whose call is split: the call continues with the plans of its passes.
/// Not an ErrorCode.
inline constexpr int32_t kSplitStatus = -1;

struct TablesHeader {
  int64_t tokens;
  int64_t rows;         ///< delivered here, padding included
  int64_t num_records;  ///< received here
  uint64_t epoch;       ///< of the dispatch that made the tables
  uint64_t identity;    ///< of that dispatch, identical on all ranks; compared by calls with handles
  int32_t status;       ///< ErrorCode that ended it on all ranks, or ok, or kSplitStatus
  int32_t failed_rank;  ///< the first rank that could not take part, if not ok
  int32_t moved;        ///< 1 once its rows and records have arrived
  int32_t left_out;     ///< 1 if it did nothing, not even on this rank: see ObjectState::halted_by
  int32_t any_weights;  ///< records carry weights
  int64_t invalid_ids;  ///< ids of this rank's routes that are neither -1 nor an expert
  int64_t record_begin[kMaxRanks + 1];
  int64_t tokens_of[kMaxRanks];                   ///< T of every rank
  int32_t chunk_records[kRowChunks * kMaxRanks];  ///< records_by_chunk
};

/// Shape of a handle's tables: all values that determine their sizes.
struct TablesShape {
  int world = 1;
  int experts = 0;
  int num_local_experts = 0;
  int topk = 0;
  int64_t tokens = 0;  ///< capacity in tokens
  bool expert_major = false;

  SWITCHYARD_FN int stride() const { return topk < world ? topk : world; }
};

/// Pointers into one block of device memory.
struct Tables {
  TablesHeader* header = nullptr;
  std::byte* counts = nullptr;       ///< [W] counts rows as gathered
  int32_t* ids = nullptr;            ///< [T * K] expert; -1 none; -2 - expert: dropped at capacity
  int32_t* route_row = nullptr;      ///< expert-major: [T * K] row at the expert's rank, -1 none
  SendEntry* sends = nullptr;        ///< [T * stride]
  float* weights = nullptr;          ///< [T * K] copy, for combine
  uint8_t* dropped = nullptr;        ///< [T * K]
  int64_t* first_row = nullptr;      ///< [experts here], expert-major
  int64_t* kept = nullptr;           ///< [experts here]
  int64_t* aligned = nullptr;        ///< [experts here]
  int64_t* padding = nullptr;        ///< [experts here, 2], expert-major
  int64_t* local_dropped = nullptr;  ///< [W * experts here]
  int stride = 0;
  int64_t bytes = 0;
};

/// Lays out the tables at `base`; if `base` is null, only `bytes` is valid.
inline Tables carve_tables(std::byte* base, const TablesShape& s) {
  Tables t;
  Carver carver(base);
  const int64_t routes = s.tokens * s.topk;
  carver.take(t.header, 1);
  carver.take(t.counts, s.world * ControlLayout{0, s.world, s.experts}.counts_row_bytes());
  carver.take(t.ids, routes);
  carver.take(t.route_row, s.expert_major ? routes : 0);
  carver.take(t.sends, s.tokens * s.stride());
  carver.take(t.weights, routes);
  carver.take(t.dropped, routes);
  carver.take(t.first_row, s.num_local_experts);
  carver.take(t.kept, s.num_local_experts);
  carver.take(t.aligned, s.num_local_experts);
  carver.take(t.padding, 2 * s.num_local_experts);
  carver.take(t.local_dropped, int64_t{s.world} * s.num_local_experts);
  t.stride = s.stride();
  t.bytes = carver.bytes();
  return t;
}

/// Data that a dispatch stores at its receiver besides rows: records and, if expert-major, the source of each row.
struct Received {
  std::byte* records = nullptr;
  RecordLayout layout;
  int64_t* row_source = nullptr;  ///< expert-major: [rows allocated]
  float* row_weight = nullptr;    ///< expert-major: [rows allocated]
  int64_t bytes = 0;
};

inline Received carve_received(std::byte* base, const RecordLayout& layout, int64_t rows, bool expert_major) {
  Received r;
  r.layout = layout;
  Carver carver(base);
  carver.take(r.records, layout.bytes());
  if (expert_major) {
    carver.take(r.row_source, rows);
    carver.take(r.row_weight, rows);
  }
  r.bytes = carver.bytes();
  return r;
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Decisions of a plan, as pure functions of the gathered counts: which rows are kept, how many rows a rank receives, and where
// they start. Host (plan.cpp) and device (exchange/normal/plan/plan.cu) compute the same results from these functions, each
// with its own loops.
#pragma once

#include <cstdint>

#include "layout/addressing.hpp"

namespace switchyard::detail {

SWITCHYARD_FN constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/// Capacity policy. A row is kept if its index is below its rank's capacity; a rank-major row is a record, and both are kept or
/// dropped together.
SWITCHYARD_FN constexpr bool keeps(int64_t row, int64_t capacity) { return row < capacity; }
/// Number of rows kept among `count` rows starting at `first`.
SWITCHYARD_FN constexpr int64_t kept_of(int64_t first, int64_t count, int64_t capacity) {
  return least(capacity > first ? capacity - first : 0, count);
}
/// Overflow::fail: all ranks end the call if this is true for any rank.
SWITCHYARD_FN constexpr bool overflows(int64_t rows_needed, int64_t capacity) { return rows_needed > capacity; }

/// Sizes of the data that a rank receives. `rows_needed` is the number of expert-major rows, including padding; for rank-major,
/// it is `records_needed`.
struct ReceivedSizes {
  int64_t rows, records;
};
SWITCHYARD_FN constexpr ReceivedSizes received_sizes(bool expert_major, int64_t rows_needed, int64_t records_needed,
                                                     int64_t capacity) {
  return {least(rows_needed, capacity), expert_major ? records_needed : least(records_needed, capacity)};
}
/// First record of a source, if `records_before` tokens from earlier sources go to the rank.
SWITCHYARD_FN constexpr int64_t record_begin_of(int64_t records_before, int64_t records) {
  return least(records_before, records);
}

/// Expert-major: the rows of one expert at its rank. `row` is their start without a capacity, `routes` the number of routes
/// from all sources to the expert, and `kept` the number of these that are kept.
struct ExpertRows {
  int64_t first, aligned;              ///< as delivered
  int64_t padding_begin, padding_end;  ///< rows without a source
};
SWITCHYARD_FN constexpr ExpertRows expert_rows(int64_t row, int64_t routes, int64_t kept, int alignment, int64_t capacity) {
  const int64_t first = least(row, capacity), end = least(row + round_up(routes, alignment), capacity);
  return {first, least(round_up(kept, alignment), end > first ? end - first : 0), least(row + routes, end), end};
}

}  // namespace switchyard::detail

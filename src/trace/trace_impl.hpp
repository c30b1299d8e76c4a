// SPDX-License-Identifier: Apache-2.0
// State of a Trace, shared by the code that records and the code that writes.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "switchyard/trace.hpp"
#include "trace/tick_clock.hpp"
#include "trace/tracer.hpp"

namespace switchyard {

struct Trace::Impl {
  TraceOptions options;
  std::vector<detail::Tracer> tracers;                           ///< [world]
  std::vector<std::pair<std::string, std::string>> user_events;  ///< (name, unit), ids from count_of_events up

  std::string_view event_name(uint16_t event) const;
  std::string_view event_category(uint16_t event) const;
  std::string_view event_unit(uint16_t event) const;
  detail::ClockAnchors anchors;  ///< of all tracers
};

namespace detail {

/// Converts a record to nanoseconds.
TraceRecord timed(TraceRecord record, const TickClock& clock);

/// A record with its rank and track, in nanoseconds. Ordered by rank, track and begin; of two spans with the same begin, the
/// longer one comes first (it encloses the other).
struct PlacedRecord {
  int rank;
  int track;
  TraceRecord record;
};
std::vector<PlacedRecord> placed_records(const std::vector<Tracer>& tracers, const TickClock& clock);
/// Earliest begin of all records, or 0 if there are none: the origin of all written times.
uint64_t origin_ns(const std::vector<PlacedRecord>& records);

}  // namespace detail
}  // namespace switchyard

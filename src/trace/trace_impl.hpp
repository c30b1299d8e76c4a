// SPDX-License-Identifier: Apache-2.0
// State of a Trace, shared by its recording and its writing halves.
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

/// In nanoseconds.
TraceRecord timed(TraceRecord record, const TickClock& clock);

/// One record with its place, in nanoseconds. Ordered by rank, track, begin; of two spans that begin together the longer comes
/// first (it encloses).
struct PlacedRecord {
  int rank;
  int track;
  TraceRecord record;
};
std::vector<PlacedRecord> placed_records(const std::vector<Tracer>& tracers, const TickClock& clock);
/// Smallest begin of them, 0 without any: the origin of every written time.
uint64_t origin_ns(const std::vector<PlacedRecord>& records);

}  // namespace detail
}  // namespace switchyard

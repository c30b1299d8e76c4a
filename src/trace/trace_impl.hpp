// SPDX-License-Identifier: Apache-2.0
// State of a Trace, shared by its recording and its writing halves.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "switchyard/trace.hpp"
#include "trace/tracer.hpp"

namespace switchyard {

struct Trace::Impl {
  TraceOptions options;
  std::vector<detail::Tracer> tracers;                           ///< [world]
  std::vector<std::pair<std::string, std::string>> user_events;  ///< (name, unit), ids from count_of_events up

  std::string_view event_name(uint16_t event) const;
  std::string_view event_category(uint16_t event) const;
  std::string_view event_unit(uint16_t event) const;
  /// Smallest begin of all records, 0 without any: the origin of every written time.
  uint64_t origin_ns() const;
};

namespace detail {

/// One record with its place. Ordered by rank, track, begin; of two spans that begin together the longer comes first (it
/// encloses).
struct PlacedRecord {
  int rank;
  int track;
  TraceRecord record;
};
std::vector<PlacedRecord> placed_records(const std::vector<Tracer>& tracers);

}  // namespace detail
}  // namespace switchyard

// SPDX-License-Identifier: Apache-2.0
// A trace file written by Trace::write_chrome_json.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "switchyard/trace.hpp"

namespace switchyard::tool {

/// An event that cannot occur in a trace: its index, its value, and the allowed values.
struct BadEvent : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct TraceFile {
  int world = 1, num_warps = 1;
  uint64_t lost = 0, clock_error_ns = 0;
  std::vector<TraceSlice> slices;  ///< in the order of Trace::slices()
};

/// \throws UsageError if the file cannot be read, is compressed, or is not a trace of this library
TraceFile read_trace_file(const std::string& path);
/// Reads a trace from its document, without the markers at the heads of arrows. \throws BadEvent naming an event with an
/// impossible time, process or track; std::exception for any other missing content
TraceFile trace_file_from(const nlohmann::json& document);
/// Like Trace::summary(), with the phases in order of appearance.
std::vector<TracePhase> phases_of(const std::vector<TraceSlice>& slices);

}  // namespace switchyard::tool

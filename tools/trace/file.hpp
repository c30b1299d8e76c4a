// SPDX-License-Identifier: Apache-2.0
// A trace as Trace::write_chrome_json left it in a file.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "switchyard/trace.hpp"

namespace switchyard::tool {

/// An event of a trace that no trace can have: which one, what was given, and what is allowed.
struct BadEvent : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct TraceFile {
  int world = 1, num_warps = 1;
  uint64_t lost = 0, clock_error_ns = 0;
  std::vector<TraceSlice> slices;  ///< in the order of Trace::slices()
};

/// \throws UsageError if the file cannot be read, is packed or is no trace of this library
TraceFile read_trace_file(const std::string& path);
/// Reads a trace from its document; the markers at the heads of arrows are left out. \throws BadEvent naming the event whose
/// time, process or track cannot be; std::exception where something else is missing
TraceFile trace_file_from(const nlohmann::json& document);
/// As Trace::summary(), phases in the order in which they occur.
std::vector<TracePhase> phases_of(const std::vector<TraceSlice>& slices);

}  // namespace switchyard::tool

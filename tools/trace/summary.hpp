// SPDX-License-Identifier: Apache-2.0
// Summary of a recorded trace: time by phase and rank, the busiest links, the ranks for which others waited, gaps, and the cost
// of recording.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "check/scenario.hpp"
#include "switchyard/trace.hpp"
#include "trace/file.hpp"
#include "trace/record.hpp"

namespace switchyard::tool {

/// Times of the same calls with and without recording on the slowest rank, with one pair per round.
struct TraceCost {
  std::vector<double> plain_us, traced_us;
  /// Ratio of the rounds' lower quartiles, minus one. Lower quartiles are used because disturbances only make rounds longer.
  double share() const;
};

nlohmann::json summary_json(const TraceVerbOptions& options, const Scenario& s, const Trace& trace, const TraceCost& cost);
void print_summary(const TraceVerbOptions& options, const Scenario& s, const Trace& trace, const TraceCost& cost);
/// Summary of a trace file, without the data known only to the run (its configuration, and links between more than two ranks).
nlohmann::json file_summary_json(const std::string& path, TraceFile file);
void print_file_summary(const std::string& path, TraceFile file);

}  // namespace switchyard::tool

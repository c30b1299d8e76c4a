// SPDX-License-Identifier: Apache-2.0
// What a recorded trace says: time by phase and rank, the busiest links, whom the others waited for, where nothing happened,
// and what recording costs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "check/scenario.hpp"
#include "switchyard/trace.hpp"
#include "trace/file.hpp"
#include "trace/record.hpp"

namespace switchyard::tool {

/// Times of the same calls with and without recording, a pair per round, of the slowest rank.
struct TraceCost {
  std::vector<double> plain_us, traced_us;
  /// Ratio of the lower quartiles of the rounds, less one. Quartiles, because what disturbs a round makes it longer.
  double share() const;
};

nlohmann::json summary_json(const TraceVerbOptions& options, const Scenario& s, const Trace& trace, const TraceCost& cost);
void print_summary(const TraceVerbOptions& options, const Scenario& s, const Trace& trace, const TraceCost& cost);
/// Summary of a written trace: everything but what only the run knew (its configuration, links between more than two ranks).
nlohmann::json file_summary_json(const std::string& path, TraceFile file);
void print_file_summary(const std::string& path, TraceFile file);

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// What `switchyard trace` records: the calls of one rank, in any mode, on the CPU or on a GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench/options.hpp"
#include "device/rank_device.hpp"
#include "run/modes.hpp"
#include "switchyard/group.hpp"

namespace switchyard::tool {

class TracedCalls {
 public:
  virtual ~TracedCalls() = default;
  /// Collective. One dispatch and combine, or what the mode has instead.
  virtual void call() = 0;
};

/// What this verb does in a mode.
struct TraceMode {
  const Mode& mode;
  /// Collective. `o` and `s` must outlive the result.
  std::unique_ptr<TracedCalls> (*make)(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device);
  size_t (*heap_bytes)(const BenchOptions& o, const Scenario& s);    ///< of a group whose ranks make these calls
  size_t (*device_bytes)(const BenchOptions& o, const Scenario& s);  ///< of a rank's device
};
const TraceMode& trace_mode(const BenchOptions& o);
/// Names of the modes that can be traced.
std::vector<std::string> trace_modes();

}  // namespace switchyard::tool

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
#include "switchyard/trace.hpp"

namespace switchyard::tool {

class TracedCalls {
 public:
  virtual ~TracedCalls() = default;
  /// Collective. One dispatch and combine, or what the mode has instead. `recording`: the group's trace, or null: for spans of
  /// what the library does not record by itself.
  virtual void call(Trace* recording) = 0;
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
/// Mode layer: makes --form automatic the one that the library has, fused before separate, and what else follows from it.
/// \throws UsageError if the form asked for is none that the library has, or does not go together with other words
void settle_layer(BenchOptions& o, const Scenario& s);
/// Names of the modes that can be traced.
std::vector<std::string> trace_modes();

}  // namespace switchyard::tool

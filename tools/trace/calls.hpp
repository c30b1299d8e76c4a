// SPDX-License-Identifier: Apache-2.0
// The calls recorded by `switchyard trace`, on one rank: any mode, on the CPU or on a GPU.
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
  /// Collective. One dispatch and one combine, or the mode's equivalent.
  virtual void call() = 0;
};

/// This verb's calls for a mode.
struct TraceMode {
  const Mode& mode;
  /// Collective. `o` and `s` must outlive the result.
  std::unique_ptr<TracedCalls> (*make)(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device);
  size_t (*heap_bytes)(const BenchOptions& o, const Scenario& s);    ///< of a group whose ranks make these calls
  size_t (*device_bytes)(const BenchOptions& o, const Scenario& s);  ///< of a rank's device
};
const TraceMode& trace_mode(const BenchOptions& o);
/// Mode layer: resolves --form automatic to a form that the library supports (fused if possible, else separate) and sets
/// dependent options. \throws UsageError if the library does not support the requested form, or if that form conflicts with
/// other options
void settle_layer(BenchOptions& o, const Scenario& s);
/// Names of the modes that can be traced.
std::vector<std::string> trace_modes();

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// What `switchyard trace` records: the calls of one rank, in any mode, on the CPU or on a GPU.
#pragma once

#include <memory>

#include "bench.hpp"
#include "low_latency_check.hpp"
#include "rank_device.hpp"
#include "switchyard/group.hpp"

namespace switchyard::tool {

DType type_of(const BenchOptions& o);
ScaleKind scales_of(const BenchOptions& o);
CombineOrder order_of(const BenchOptions& o);
/// Modes of LowLatencyExchange.
bool fixed_shape(const BenchOptions& o);

class TracedCalls {
 public:
  virtual ~TracedCalls() = default;
  /// Collective. One dispatch and combine, or what the mode has instead.
  virtual void call() = 0;
};

/// Collective. `o` and `s` must outlive the result.
std::unique_ptr<TracedCalls> make_traced_calls(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device);
/// Of a group whose ranks make these calls, and of a rank's device.
size_t traced_heap_bytes(const BenchOptions& o, const Scenario& s);
size_t traced_device_bytes(const BenchOptions& o, const Scenario& s);

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// Times of the steps of a separate layer, from its trace.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "device/clock.hpp"
#include "switchyard/group.hpp"
#include "switchyard/trace.hpp"

namespace switchyard::tool {

/// Seconds of one call on one rank. The time of a step is that of its spans on the call track. `combine` includes the wait for
/// ranks whose experts end later.
struct LayerSteps {
  double layer = 0;  ///< from the beginning of `dispatch` to the end of the last step
  double dispatch = 0, combine = 0;
  double up = 0, down = 0;  ///< 0 unless the products are separate steps, as on GPUs
  double experts = 0;       ///< both products
};

/// Returns the calls of one rank, in order. A call begins with each `dispatch`; a step without spans takes 0 seconds. `slices`:
/// a result of Trace::slices().
std::vector<LayerSteps> layer_steps(const std::vector<TraceSlice>& slices, int rank);

/// Collective. Records `calls` calls of a separate layer under the conditions of clock.time() and returns this rank's steps,
/// in order. GPUs: all recordings of a group must use the same `options`. The records must have space for at least one call.
/// \throws Error(system) if the trace does not contain each call
std::vector<LayerSteps> record_steps(Group& group, Clock& clock, const TraceOptions& options, int64_t calls,
                                     const std::function<void()>& layer);

/// Keys of the steps in documents.
std::vector<const char*> step_keys();
/// Appends the seconds of `steps` to the arrays at these keys of `out`. `in_parts`: also up and down, separately.
void add_steps(nlohmann::json& out, const std::vector<LayerSteps>& steps, bool in_parts);

}  // namespace switchyard::tool

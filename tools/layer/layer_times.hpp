// SPDX-License-Identifier: Apache-2.0
// What a trace says of the calls of layers in one call: what their warps did, and how much of the communication lies behind
// the products.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "device/rank_device.hpp"
#include "switchyard/group.hpp"
#include "switchyard/trace.hpp"

namespace switchyard::tool {

/// Of one rank; times are means over its calls. A call is a span `layer`, and of a worker's spans counts what lies inside.
struct LayerTimes {
  int rank = 0;
  int64_t calls = 0;
  double call_us = 0;
  /// Of calls with products: from the begin of the call to that of the first `expert_up`, and from the end of the last
  /// `expert_down` to that of the call. 0 if no call has any.
  double before_up_us = 0, after_down_us = 0;
  /// That multiply or sum: those with an `expert_up`, `expert_down` or `sum_returned` in any of the calls.
  int workers = 0;
  /// What these workers do, as shares of their number times the time of the calls. The rest is not recorded.
  double up_share = 0, down_share = 0, sum_share = 0, wait_share = 0;
  /// `pull_rows` and `return_rows`, added up over all workers, of a call; and how much of it lies inside the time in which any
  /// worker of the same rank is in an `expert_up` or `expert_down`.
  double communication_us = 0, hidden_us = 0;

  double product_share() const { return up_share + down_share; }
  double hidden_share() const { return communication_us > 0 ? hidden_us / communication_us : 0; }
};

/// Ranks ascending; those without a `layer` that counts have no entry. `slices`: as Trace::slices() returns them. `left_out`:
/// of each rank the first calls, which do not count.
std::vector<LayerTimes> layer_times(const std::vector<TraceSlice>& slices, size_t left_out = 0);

/// Who records when a rank's calls are: all warps of `sms` multiprocessors of a GPU, or the workers of a rank on the host.
TraceOptions layer_trace_options(Backend backend, int64_t sms, int64_t blocks, int64_t warps);
/// Collective. Records `calls` of one layer in one call each, at least 2, and says what this rank's did but for the first one,
/// which takes longer on a GPU than those that follow it at once: one entry, or none if records were forgotten.
std::vector<LayerTimes> record_layers(Group& group, const RankDevice& device, const TraceOptions& options, int calls,
                                      const std::function<void()>& call);

/// As documents have them: an object for each rank.
nlohmann::json layer_times_json(const std::vector<LayerTimes>& times);
/// One of those objects, read.
LayerTimes layer_times_from(const nlohmann::json& encoded);
/// As a table, and what its columns mean; empty without entries.
std::string layer_times_text(const std::vector<LayerTimes>& times);

}  // namespace switchyard::tool

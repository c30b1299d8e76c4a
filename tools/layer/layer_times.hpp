// SPDX-License-Identifier: Apache-2.0
// Times of fused layers from a trace: what their warps do, and the share of communication that overlaps with the products.
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

/// Times of one rank, averaged over its calls. A call is a `layer` span; only the parts of worker spans inside it are counted.
struct LayerTimes {
  int rank = 0;
  int64_t calls = 0;
  double call_us = 0;
  /// Means over calls with products: the time from the beginning of the call to the beginning of the first `expert_up`, and
  /// from the end of the last `expert_down` to the end of the call. Both are 0 if no call has products.
  double before_up_us = 0, after_down_us = 0;
  /// Number of workers that multiply or sum, that is, those with an `expert_up`, `expert_down` or `sum_returned` in any of the
  /// calls.
  int workers = 0;
  /// Shares of these workers' total time, which is their number times the duration of the calls. The rest of that time is not
  /// recorded.
  double up_share = 0, down_share = 0, sum_share = 0, wait_share = 0;
  /// Sum of `pull_rows` and `return_rows` over all workers, per call, and the part of it during which any worker of the same
  /// rank is in `expert_up` or `expert_down`.
  double communication_us = 0, hidden_us = 0;

  double product_share() const { return up_share + down_share; }
  double hidden_share() const { return communication_us > 0 ? hidden_us / communication_us : 0; }
};

/// Ranks are in ascending order; those without a counted `layer` have no entry. `slices`: a result of Trace::slices().
/// `left_out`: number of initial calls to skip on each rank.
std::vector<LayerTimes> layer_times(const std::vector<TraceSlice>& slices, size_t left_out = 0);

/// Options for recording all warps of `sms` multiprocessors of a GPU, or a rank's workers on the host.
TraceOptions layer_trace_options(Backend backend, int64_t sms, int64_t blocks, int64_t warps);
/// Collective. Records `run` in `trace` and returns the spans.
std::vector<TraceSlice> recorded(Group& group, const RankDevice& device, Trace& trace, const std::function<void()>& run);
/// Collective. Records `calls` fused layers, at least 2, and returns this rank's times without the first call, which takes
/// longer on a GPU than the calls that follow immediately. Returns one entry, or none if records were lost.
std::vector<LayerTimes> record_layers(Group& group, const RankDevice& device, const TraceOptions& options, int calls,
                                      const std::function<void()>& call);

/// Times in the format used in documents: one object per rank.
nlohmann::json layer_times_json(const std::vector<LayerTimes>& times);
/// Parses one of these objects.
LayerTimes layer_times_from(const nlohmann::json& encoded);
/// Times as a table with an explanation of its columns; empty without entries.
std::string layer_times_text(const std::vector<LayerTimes>& times);

}  // namespace switchyard::tool

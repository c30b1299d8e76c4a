// SPDX-License-Identifier: Apache-2.0
// Host copies of a dispatch's results, on either backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/rank_device.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::tool {

/// Owns the copies to which `view` points. Movable.
struct HostDispatched {
  Dispatched view;  ///< arrays that do not apply are empty, as on the CPU
  std::vector<std::byte> rows, scales;
  std::vector<int32_t> topk_ids, source_token;
  std::vector<float> topk_weights, row_weights;
  std::vector<int64_t> row_source, expert_first_row, tokens_per_expert, aligned_per_expert, dropped_per_source;
  std::vector<uint8_t> dropped;
};

/// Copies a dispatch's results from a GPU and waits for the copies; on the host, returns the results unchanged. `weighted`:
/// whether the dispatch had weights.
HostDispatched copy_to_host(const Dispatched& d, bool weighted, const RankDevice& device);

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// What a CUDA dispatch delivered, in host memory, so that checks written for the CPU apply.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "switchyard/normal.hpp"

namespace switchyard::tool {

/// Copies `bytes` from the device; waits for the work enqueued before.
using DeviceRead = std::function<void(void* host, const void* device, size_t bytes)>;

/// Owns the copies that `view` points to. Movable.
struct HostDispatched {
  Dispatched view;  ///< arrays that do not apply are empty, as on the CPU
  std::vector<std::byte> rows, scales;
  std::vector<int32_t> topk_ids, source_token;
  std::vector<float> topk_weights, row_weights;
  std::vector<int64_t> row_source, expert_first_row, tokens_per_expert, aligned_per_expert, dropped_per_source;
  std::vector<uint8_t> dropped;
};

/// `weighted`: the dispatch was given weights. Waits for the GPU.
HostDispatched copy_to_host(const Dispatched& d, bool weighted, const DeviceRead& read);

}  // namespace switchyard::tool

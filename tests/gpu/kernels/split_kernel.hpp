// SPDX-License-Identifier: Apache-2.0
// The assignment of a call's messages to the warps of a grid.
#pragma once

#include <cuda_runtime_api.h>

#include "layout/low_latency.hpp"
#include "protocol/call.hpp"

namespace harness {

/// Enqueues a grid whose warps iterate over their shares as in a call. Device memory, zeroed: `seen` [W, `units`, pieces],
/// number of warps that received each message; `share` [blocks * warps], number of messages of each warp. `units`: maximum
/// number of units that a rank sends.
void launch_split(const switchyard::detail::CallContext& call, const switchyard::detail::LowLatencyLayout& layout, int pieces,
                  int units, uint32_t* seen, uint32_t* share, int blocks, int warps, cudaStream_t stream);

}  // namespace harness

// SPDX-License-Identifier: Apache-2.0
// Records how a call's messages are assigned to the warps of a grid.
#pragma once

#include <cuda_runtime_api.h>

#include "layout/low_latency.hpp"
#include "protocol/call.hpp"

namespace harness {

/// Enqueues a grid whose warps iterate over their shares as in a call. Zeroed device memory: `seen` [W, `units`, pieces] is the
/// number of warps that received each message; `share` [blocks * warps] is the number of messages for each warp. `units`: the
/// maximum number of units that a rank sends.
void launch_split(const switchyard::detail::CallContext& call, const switchyard::detail::LowLatencyLayout& layout, int pieces,
                  int units, uint32_t* seen, uint32_t* share, int blocks, int warps, cudaStream_t stream);

}  // namespace harness

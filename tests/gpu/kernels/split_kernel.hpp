// SPDX-License-Identifier: Apache-2.0
// Which messages of a call the warps of a grid receive.
#pragma once

#include <cuda_runtime_api.h>

#include "layout/low_latency.hpp"
#include "protocol/call.hpp"

namespace harness {

/// Enqueues a grid whose warps go through their shares as in a call. Device memory, zeroed: `seen` [W, `units`, pieces], how
/// often each message was somebody's; `share` [blocks * warps], how many each warp had. `units`: the most that a rank sends.
void launch_split(const switchyard::detail::CallContext& call, const switchyard::detail::LowLatencyLayout& layout, int pieces,
                  int units, uint32_t* seen, uint32_t* share, int blocks, int warps, cudaStream_t stream);

}  // namespace harness

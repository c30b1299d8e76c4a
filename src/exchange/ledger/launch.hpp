// SPDX-License-Identifier: Apache-2.0
// Host interface of the ledger combine kernel. Every function enqueues on `stream` of the current device and returns without
// waiting. Launch failures throw Error(system).
#pragma once

#include "exchange/gpu/kernel.hpp"
#include "exchange/gpu/state.hpp"
#include "protocol/ledger/combine.hpp"
#include "switchyard/tuning.hpp"

namespace switchyard::detail {

inline constexpr int kLedgerWarps = kMaxLedgerWarps;  ///< per block, without a tuning

struct CudaLedgerParams {
  LedgerParams l;  ///< all but the epoch
  EpochState* state = nullptr;
  int warps = kLedgerWarps;  ///< of this launch
};

void launch_ledger(const CudaLedgerParams& params, int blocks, const DeviceLimits& limits, gpu::Stream stream);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// The kernels of device-initiated networking, in a build that found NCCL's header.
#pragma once

#include <chrono>
#include <memory>

#include "carrier/nccl/gin.hpp"
#include "exchange/gpu/rank.hpp"

namespace switchyard::detail {

class GpuGin : public GinDevice {
 public:
  /// Of the rounds that are enqueued from now on: the call that they are part of, for faults, and how long a kernel waits.
  virtual void set_call(Operation operation, std::chrono::nanoseconds timeout) = 0;
};

/// With the rank's GPU current, which outlives it. Null: this build has no kernels for it.
std::shared_ptr<GpuGin> make_gpu_gin(CudaRank& gpu);

}  // namespace switchyard::detail

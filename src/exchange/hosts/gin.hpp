// SPDX-License-Identifier: Apache-2.0
// Kernels for device-initiated networking, in builds that found NCCL's header.
#pragma once

#include <chrono>
#include <memory>

#include "carrier/nccl/gin.hpp"
#include "exchange/gpu/rank.hpp"

namespace switchyard::detail {

class GpuGin : public GinDevice {
 public:
  /// Sets the operation (for fault records) and the kernel timeout of rounds enqueued from now on.
  virtual void set_call(Operation operation, std::chrono::nanoseconds timeout) = 0;
};

/// The rank's GPU must be current and must outlive the result. Returns null if this build has no such kernels.
std::shared_ptr<GpuGin> make_gpu_gin(CudaRank& gpu);

}  // namespace switchyard::detail

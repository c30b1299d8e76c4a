// SPDX-License-Identifier: Apache-2.0
// The CUDA arch for groups that span hosts; its ops are the same. Protocols skip stores to ranks whose segments are not mapped
// (is_mapped). Kernels for a single host are compiled without this check.
#pragma once

#include "arch/cuda/cuda_arch.cuh"

namespace switchyard::detail {

struct CudaHosts : Cuda {
  using Warp = CudaWarp;
  static constexpr bool kSpansHosts = true;
};

/// Variant for short rows; see CudaLanes.
struct CudaLanesHosts : CudaLanes {
  using Warp = CudaWarp;
  static constexpr bool kSpansHosts = true;
};

}  // namespace switchyard::detail

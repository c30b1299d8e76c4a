// SPDX-License-Identifier: Apache-2.0
// The CUDA arch of groups that span hosts, with the same ops. Protocols skip stores to ranks whose segments are not mapped
// (is_mapped). Kernels for one host are compiled without that check.
#pragma once

#include "arch/cuda/cuda_arch.cuh"

namespace switchyard::detail {

struct CudaHosts : Cuda {
  using Warp = CudaWarp;
  static constexpr bool kSpansHosts = true;
};

/// Variant for short rows, like CudaLanes.
struct CudaLanesHosts : CudaLanes {
  using Warp = CudaWarp;
  static constexpr bool kSpansHosts = true;
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Parameters of the gradient kernels, and their host interface.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "arch/gpu_runtime.hpp"
#include "gemm/gpu/grouped_params.hpp"
#include "gemm/gradients/gradient_tiles.hpp"

namespace switchyard::detail::gemm {

struct WeightGradientParams {
  CUtensorMap dy, x;  ///< [end, n] and [end, k], boxes of 64 columns and kStageRows rows
  CUtensorMap dw;     ///< [experts, n, k], boxes of kBoxRowBytes bytes of kBoxRows rows of an expert
  RowRanges ranges;
  uint32_t* tickets = nullptr;  ///< {claimed, blocks that have ended}; 0 before and after a launch
  int num_experts = 0, n = 0, k = 0;
  int tiles_n = 0, tiles_k = 0;
  int end = 0;  ///< neither tensor has rows from here on
  uint32_t shared_bytes = 0;
  uint32_t num_stages = 0;  ///< number of stages that fit
};

struct WeightGradientKernel {
  /// Loads the kernel on the current device and allows it to use this many bytes of shared memory.
  gpu::Status (*prepare)(int shared_bytes);
  gpu::Status (*launch)(const gpu::Grid& grid, gpu::Stream stream, const WeightGradientParams& params);
};
/// `wide`: gradients are float32; otherwise, they have the element type of the rows. `add`: gradients are added to the existing
/// values.
WeightGradientKernel weight_gradient_bf16(bool wide, bool add);
WeightGradientKernel weight_gradient_f16(bool wide, bool add);

struct SwigluGradientParams {
  RowRanges ranges;
  const void* h = nullptr;   ///< [end, 2 * columns]
  const void* da = nullptr;  ///< [end, columns]
  void* dh = nullptr;        ///< [end, 2 * columns]
  void* a = nullptr;         ///< [end, columns], or null
  Gating gating;
  int num_experts = 0, columns = 0;
};
struct RoutingGradientParams {
  RowRanges ranges;
  const void* dy = nullptr;  ///< [end, columns]
  const void* y = nullptr;   ///< [end, columns]
  float* dweight = nullptr;  ///< [end]
  int num_experts = 0, columns = 0;
};

/// Threads per block in the row-wise kernels, which have one block per multiprocessor.
inline constexpr int kRowThreads = 1024;

/// A row-wise kernel.
template <class Params>
struct RowKernel {
  gpu::Status (*prepare)();  ///< loads the kernel on the current device
  gpu::Status (*launch)(int blocks, gpu::Stream stream, const Params& params);
};
RowKernel<SwigluGradientParams> swiglu_gradient_kernel(bool f16);
RowKernel<RoutingGradientParams> routing_gradient_kernel(bool f16);

}  // namespace switchyard::detail::gemm

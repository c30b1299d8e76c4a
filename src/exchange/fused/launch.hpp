// SPDX-License-Identifier: Apache-2.0
// The kernel of a whole MoE layer, as the host sees it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "exchange/fused/sizes.hpp"
#include "exchange/gpu/kernel.hpp"
#include "exchange/normal/tables.hpp"
#include "gemm/gpu/grouped_params.hpp"

namespace switchyard::detail {

/// Trivially copyable; set by CudaFused. The kernel completes it by the epoch and the tables' header, which the plan wrote.
struct FusedParams {
  CallContext call;
  ObjectState* state = nullptr;
  const TablesHeader* header = nullptr;
  FusedLayout layout;
  FusedMemory memory;
  gemm::GroupedParams up, down;  ///< the rows of `down` are the outputs of `up`; ranges: those of `up` hold for both
  ExpertMap map;
  int lag = 0;                         ///< steps between an expert's product up and the one down
  int64_t most_tokens = 0;             ///< bound of T
  const std::byte* x = nullptr;        ///< [T, H]; null: at layout.x() already
  const int32_t* ids = nullptr;        ///< [T, K] expert, or negative
  const int32_t* route_row = nullptr;  ///< [T, K] row at the expert's rank, or -1
  const float* weights = nullptr;      ///< [T, K], or null: all 1
  std::byte* out = nullptr;            ///< [T, H]
  bool add = false;                    ///< sums begin with what `out` holds
};

void launch_fused(const FusedParams& params, int blocks, const DeviceLimits& limits, gpu::Stream stream);

}  // namespace switchyard::detail

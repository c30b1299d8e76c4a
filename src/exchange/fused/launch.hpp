// SPDX-License-Identifier: Apache-2.0
// The kernel of a whole MoE layer, as the host sees it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "exchange/fused/sizes.hpp"
#include "exchange/gpu/kernel.hpp"
#include "exchange/normal/plan/tables.hpp"
#include "gemm/gpu/grouped_params.hpp"

namespace switchyard::detail {

/// Scales of the operands of a product in fp8.
struct FusedFp8Scales {
  CUtensorMap rows;                 ///< float32 [blocks of 128, rows], boxes of kFusedScaleBox rows of a block
  const float4* weights = nullptr;  ///< spread_scales()
};

/// Trivially copyable; set by CudaFused. The kernel completes it by the epoch and the tables' header, which the plan wrote.
struct FusedParams {
  CallContext call;
  ObjectState* state = nullptr;
  const TablesHeader* header = nullptr;
  FusedLayout layout;
  FusedMemory memory;
  gemm::GroupedParams up, down;  ///< the rows of `down` are the outputs of `up`; ranges: those of `up` hold for both
  ExpertMap map;
  FusedParts parts;                    ///< of the second half alone, p.x is null and rows are those of the call before
  int lag = 0;                         ///< steps between an expert's product up and the one down
  int64_t most_tokens = 0;             ///< bound of T
  const std::byte* x = nullptr;        ///< [T, H]; null: at layout.x() already
  const int32_t* ids = nullptr;        ///< [T, K] expert, or negative
  const int32_t* route_row = nullptr;  ///< [T, K] row at the expert's rank, or -1
  const float* weights = nullptr;      ///< [T, K], or null: all 1
  std::byte* out = nullptr;            ///< [T, H]
  bool add = false;                    ///< sums begin with what `out` holds
  RowWay pulled, returned;             ///< of a token, and of an output; of fp8, the last piece of a token holds all its scales
  bool ue8m0 = false;                  ///< fp8: a token's scales are powers of two
  FusedFp8Scales up_scales, down_scales;  ///< fp8
};

void launch_fused(const FusedParams& params, int blocks, const DeviceLimits& limits, gpu::Stream stream);

/// The same in fp8; `blocks` is even.
void launch_fused_fp8(const FusedParams& params, int blocks, const DeviceLimits& limits, gpu::Stream stream);

/// The scales of weights, one for 128 x 128 of them, as the kernel in fp8 reads them.
struct WeightScales {
  const void* given = nullptr;  ///< [experts, rows, blocks], float32, or UE8M0
  bool ue8m0 = false;
  int experts = 0, rows = 0, blocks = 0;  ///< rows: gated: of the gate, then as many of the up half
  bool gated = false;
  int column_tiles = 0;
  float4* spread = nullptr;  ///< [experts, column tiles, 2 blocks of a cluster, blocks]: scales of a stage's first weights, of
                             ///< the others, 0, 0
};
void spread_scales(const WeightScales& scales, gpu::Stream stream);

}  // namespace switchyard::detail

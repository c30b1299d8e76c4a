// SPDX-License-Identifier: Apache-2.0
// Host interface of the kernel for a whole MoE layer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "exchange/fused/sizes.hpp"
#include "exchange/gpu/kernel.hpp"
#include "exchange/normal/plan/tables.hpp"
#include "gemm/gpu/grouped_params.hpp"

namespace switchyard::detail {

/// Operand scales of an fp8 product.
struct FusedFp8Scales {
  CUtensorMap rows;                 ///< float32 [blocks of 128, rows], boxes of kFusedScaleBox rows of one block
  const float4* weights = nullptr;  ///< spread_scales()
};

/// Trivially copyable; set by CudaFused. The kernel adds the epoch and the table header written by the plan.
struct FusedParams {
  CallContext call;
  ObjectState* state = nullptr;
  const TablesHeader* header = nullptr;
  FusedLayout layout;
  FusedMemory memory;
  gemm::GroupedParams up, down;  ///< the rows of `down` are the outputs of `up`; the ranges of `up` apply to both
  ExpertRanges map;
  /// Overflow::split: number of this pass, from 1, of a call that may be split; the kernel of the whole call has 0. A pass does
  /// nothing if its number exceeds ObjectState::passes.
  int pass = 0;
  FusedParts parts;                    ///< second half only: p.x is null and the rows are those of the previous call
  int lag = 0;                         ///< steps between an expert's up product and its down product
  int64_t max_tokens = 0;              ///< bound of T
  const std::byte* x = nullptr;        ///< [T, H]; null: already at layout.x()
  const int32_t* ids = nullptr;        ///< [T, K] expert, or negative
  const int32_t* route_row = nullptr;  ///< [T, K] row at the expert's rank, or -1
  const float* weights = nullptr;      ///< [T, K], or null: all 1
  std::byte* out = nullptr;            ///< [T, H]
  bool add = false;                    ///< sums start from the contents of `out`
  CopyPlan pulled, returned;           ///< for a token, and for an output; fp8: a token's last piece contains all its scales
  /// per_rank: [n], piece size in bytes for n rows that are summed together; n pieces fit into kPieceBytes.
  uint16_t summed_bytes[kMaxTopk + 1] = {};
  bool ue8m0 = false;                     ///< fp8: a token's scales are powers of two
  FusedFp8Scales up_scales, down_scales;  ///< fp8
};

void launch_fused(const FusedParams& params, int blocks, const DeviceLimits& limits, gpu::Stream stream);

/// Launches the fp8 layer; `blocks` must be even.
void launch_fused_fp8(const FusedParams& params, int blocks, const DeviceLimits& limits, gpu::Stream stream);

/// Weight scales, one per 128 x 128 block, in the form that the fp8 kernel reads.
struct WeightScales {
  const void* given = nullptr;  ///< [experts, rows, blocks], float32, or UE8M0
  bool ue8m0 = false;
  int experts = 0, rows = 0, blocks = 0;  ///< gated: the first half of the rows is the gate half
  bool gated = false;
  int column_tiles = 0;
  float4* spread = nullptr;  ///< [experts, column tiles, blocks]: scales of the two halves of a stage's weights, 0, 0
};
void spread_scales(const WeightScales& scales, gpu::Stream stream);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Sums of the fp8 kernel for many rows (wide_kernel.cuh) with scales per channel: the scales of weights and, with per_channel,
// those of rows are applied to the whole sums.
#pragma once

#include "gemm/gpu/fp8/wide_roles.cuh"

namespace switchyard::detail::gemm {

/// A thread's sums for each half of the weights, in the accumulator layout of Wgmma.
struct WideSums {
  float half[2][kHalfColumns / 2];
};

/// Computes the sums of this warpgroup's unit, which the tensor cores add over all stages. Rows and weights are read from
/// shared memory. The products of one stage are in flight while those of the next one are enqueued.
template <class K>
__device__ __forceinline__ void multiply_wide_unit_unscaled(const GroupedParams& p, const WideStorage<K>& storage, Position& at,
                                                            WideSums& sums) {
  auto& all = reinterpret_cast<float(&)[kHalfColumns]>(sums.half);
#pragma unroll
  for (float& v : all) v = 0;
  // Low halves of the descriptors of the first stage; see WideOperands::weights(). All high halves are equal.
  const uint32_t weights_of_first = static_cast<uint32_t>(ptx::operand_at(p.shared_base + WideStorage<K>::kStagesAt));
  uint32_t rows_of_first =
      static_cast<uint32_t>(ptx::operand_at(storage.stage(0) + kWideRowsAt + static_cast<uint32_t>(math_group()) * kUnitBytes));
  ptx::keep_register(rows_of_first);
  const auto operand = [](uint32_t low) { return ptx::operand_at(0) >> 32 << 32 | low; };
  uint32_t last = 0;
#pragma unroll 1
  for (int block = 0; block < p.inner_blocks; ++block) {
    constexpr auto kNextStage = static_cast<uint32_t>(ptx::operand_bytes(kWideStageBytes));
    const uint32_t slot = at.slot, rows = rows_of_first + slot * kNextStage, weights = weights_of_first + slot * kNextStage;
    ptx::mbarrier_wait(storage.full(slot), at.parity);
    ptx::wgmma_begin();
#pragma unroll
    for (uint32_t step = 0; step < kFp8Inner / 32; ++step) {
      constexpr auto kStep = static_cast<uint32_t>(ptx::kInnerStep);
      ptx::multiply_e4m3_256(all, operand(rows + kStep * step), operand(weights + kStep * step));
    }
    ptx::wgmma_commit();
    if (block > 0) {
      ptx::wgmma_wait<1>();
      release_in_both(storage, last);
    }
    last = slot;
    advance(storage, at);
  }
  ptx::wgmma_wait<0>();
  ptx::keep(all);
  release_in_both(storage, last);
}

/// Multiplies the sums of the block's tile number `tile` by the scales of the weights and, with per_channel, of the rows.
template <class K>
__device__ __forceinline__ void apply_wide_tile_scales(const WideStorage<K>& storage, uint32_t tile, WideSums& sums) {
  const uint32_t scales = wait_tile_scales(storage, tile);
  float2 rows{1, 1};
  if constexpr (!kStageScales<K>) {
    const uint32_t own =
        scales + kTileRowScalesAt + static_cast<uint32_t>(math_group() * kUnitRows + warp_of_group() * 16 + lane() / 4) * 4;
    rows = {ptx::load_shared_float(own), ptx::load_shared_float(own + 8 * 4)};
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kHalfColumns / 2; i += 4) {
      const float2 weights =
          ptx::load_shared_pair(scales + static_cast<uint32_t>(half * kHalfColumns + i * 2 + (lane() & 3) * 2) * 4);
      sums.half[half][i] *= rows.x * weights.x;
      sums.half[half][i + 1] *= rows.x * weights.y;
      sums.half[half][i + 2] *= rows.y * weights.x;
      sums.half[half][i + 3] *= rows.y * weights.y;
    }
  }
}

}  // namespace switchyard::detail::gemm

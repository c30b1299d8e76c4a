// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM for sm_90a in bf16 and f16: out[r, :] = f(weights[expert of r] * rows[r, :]). Weights are the first operand of
// the matrix instruction and rows the second. A tile may thus have any multiple of 16 rows, and little work is wasted for any
// number of rows per expert. Roles: tile_roles.cuh. A stage covers kInner elements of the inner dimension.
//
// The bits of an output depend only on its row and its weights: each sum runs over the whole inner dimension in order, in one
// accumulator, for any tile width and any position in the tile.
#pragma once

#include "gemm/gpu/tile_roles.cuh"

namespace switchyard::detail::gemm {

/// A kernel, identified by the element type of rows, weights and outputs, the order of the weights, and the final operation on
/// a tile.
template <class ElementType, ptx::OperandOrder kWeightOrder, Finish kTileFinish>
struct Kind {
  using Element = ElementType;
  static constexpr ptx::OperandOrder kOrder = kWeightOrder;
  static constexpr bool kGated = kTileFinish == Finish::gated, kActivated = kTileFinish == Finish::activated;
  static constexpr int kStageElements = kInner;                              ///< of the sum
  static constexpr int kColumns = kGated ? kTileColumns / 2 : kTileColumns;  ///< of the output, per tile
  /// If true, gate and up elements are in the same half of a warpgroup's accumulators, 8 rows apart; otherwise, they are in
  /// different halves.
  static constexpr bool kInterleaved = kGated && kOrder == ptx::OperandOrder::inner;
};

/// Multiplies 16 elements of the inner dimension for half `half` of this warpgroup's outputs.
template <class K, int kWidth, bool kFirst>
__device__ __forceinline__ void multiply(float (&d)[kWidth / 2], const Operands& s, int half, int step) {
  constexpr uint64_t kStep = K::kOrder == ptx::OperandOrder::inner ? ptx::kInnerStep : ptx::kOuterStep;
  const uint64_t a =
      s.weights + static_cast<uint64_t>(half) * ptx::operand_bytes(kQuarterBytes) + kStep * static_cast<uint64_t>(step);
  const uint64_t b = s.rows + ptx::kInnerStep * static_cast<uint64_t>(step);
  if constexpr (kFirst)
    ptx::Wgmma<kWidth>::template first<typename K::Element, K::kOrder, ptx::OperandOrder::inner>(d, a, b);
  else
    ptx::Wgmma<kWidth>::template add<typename K::Element, K::kOrder, ptx::OperandOrder::inner>(d, a, b);
}

template <class K, int kWidth, bool kFirst>
__device__ __forceinline__ void multiply_block(const SharedStorage& storage, Position& at, float (&d)[2][kWidth / 2]) {
  const Operands s = next_stage(storage, at);
#pragma unroll
  for (int step = 0; step < kInner / 16; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (kFirst && step == 0)
        multiply<K, kWidth, true>(d[half], s, half, step);
      else
        multiply<K, kWidth, false>(d[half], s, half, step);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();  // meanwhile the other warpgroup keeps the tensor cores busy
  release_stage(storage, at.slot);
  advance(storage, at);
}

/// Finishes a tile whose outputs need both halves of the accumulators.
template <class K, int kWidth>
__device__ __forceinline__ void finish_at_once(const GroupedParams& p, const SharedStorage& storage, Position& at,
                                               uint32_t entry, float (&d)[2][kWidth / 2]) {
  multiply_block<K, kWidth, false>(storage, at, d);
  multiply_block<K, kWidth, false>(storage, at, d);
  ptx::keep(d[0]);
  ptx::keep(d[1]);
  const Tile t = read_entry(entry);
  store_outputs<K, kWidth, 64>(p, storage.staging(math_group()), t.column_tile * K::kColumns + math_group() * 64, t,
                               [&](int i) { return gated(p.gating, d[0][i], d[1][i]); });
}

/// Finishes all other tiles: the last two blocks are multiplied half by half, so that the first half can be stored while the
/// second is multiplied.
template <class K, int kWidth>
__device__ __forceinline__ void finish_by_halves(const GroupedParams& p, const SharedStorage& storage, Position& at,
                                                 uint32_t entry, float (&d)[2][kWidth / 2]) {
  Operands s[2];
  uint32_t slots[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if (half == 0) {
        s[block] = next_stage(storage, at);
        slots[block] = at.slot;
        advance(storage, at);
      }
#pragma unroll
      for (int step = 0; step < kInner / 16; ++step) multiply<K, kWidth, false>(d[half], s[block], half, step);
    }
    ptx::wgmma_commit();
  }
  const Tile t = read_entry(entry);
  ptx::wgmma_wait<1>();
  ptx::keep(d[0]);
  store_half<K, kWidth>(p, storage, t, 0, d[0]);
  ptx::wgmma_wait<0>();
  release_stage(storage, slots[0]);
  release_stage(storage, slots[1]);
  ptx::keep(d[1]);
  store_half<K, kWidth>(p, storage, t, 1, d[1]);
}

template <class K, int kWidth>
__device__ __forceinline__ void multiply_tile(const GroupedParams& p, const SharedStorage& storage, Position& at,
                                              uint32_t entry) {
  float d[2][kWidth / 2];
  multiply_block<K, kWidth, true>(storage, at, d);
  for (int block = 3; block < p.inner_blocks; ++block) multiply_block<K, kWidth, false>(storage, at, d);
  if constexpr (K::kGated && !K::kInterleaved)
    finish_at_once<K, kWidth>(p, storage, at, entry, d);
  else
    finish_by_halves<K, kWidth>(p, storage, at, entry, d);
}

template <class K>
__global__ void __launch_bounds__(kThreads, 1) grouped_kernel(const __grid_constant__ GroupedParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  int* const first_tickets = reinterpret_cast<int*>(shared + p.shared_bytes) - (p.num_experts + 1);
  const int widest = count_tickets(p, first_tickets, first_tickets - 1);
  const SharedStorage storage = make_storage(base, p.shared_bytes, p.num_experts, widest);
  make_barriers(storage, 1, kMathThreads + 1);
  __syncthreads();
  if (threadIdx.x >= kMathThreads) {
    ptx::dealloc_registers<56>();
    if (threadIdx.x == kLoaderThread) load_tiles<K>(p, storage);
    if (threadIdx.x == kClaimerThread) claim_tiles(p, storage, first_tickets);
  } else {
    ptx::alloc_registers<224>();
    multiply_tiles<kMaxRows>(
        storage, [&]<int kWidth>(Position& at, uint32_t entry) { multiply_tile<K, kWidth>(p, storage, at, entry); });
  }
}

template <class Element, ptx::OperandOrder kOrder>
GroupedKernel kernel_of(Finish finish) {
  return finish == Finish::plain       ? grouped_kernel_of<grouped_kernel<Kind<Element, kOrder, Finish::plain>>>()
         : finish == Finish::activated ? grouped_kernel_of<grouped_kernel<Kind<Element, kOrder, Finish::activated>>>()
                                       : grouped_kernel_of<grouped_kernel<Kind<Element, kOrder, Finish::gated>>>();
}

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM of sm_90a for fp8 e4m3 rows and weights with float32 scales, one for 128 elements of a row and one for 128 x 128
// weights; outputs are bf16. Roles: tile_roles.cuh; here one warp more brings the rows' scales.
//
// A stage is 128 elements of the sum, what a scale is for. Its product is multiplied by both scales and added in float32: the
// tensor cores add fp8 products with fewer bits than float32 has, so no sum of theirs is longer than that. A warpgroup
// multiplies the halves of its 128 outputs one after the other, because only one product has registers beside the sums;
// meanwhile the other warpgroup keeps the tensor cores busy.
#pragma once

#include "gemm/gpu/tile_roles.cuh"

namespace switchyard::detail::gemm {

template <bool kIsGated>
struct Fp8Kind {
  using Element = __nv_bfloat16;
  static constexpr ptx::OperandOrder kOrder = ptx::OperandOrder::inner;
  static constexpr bool kGated = kIsGated, kActivated = false, kInterleaved = kIsGated;
  static constexpr int kStageElements = kFp8Inner;
  static constexpr int kColumns = kGated ? kTileColumns / 2 : kTileColumns;
};

inline constexpr int kFirstScaleThread = kMathThreads + 64, kScaleThreads = 32;
inline constexpr uint32_t kScaleBytes = kMostFp8Rows * 4;  // of a stage's rows
inline constexpr uint32_t kScaleRoom = 8192;               // of all stages, before the other room
static_assert(kScaleRoom >= kScaleBytes * kMostStages);

__device__ __forceinline__ uint32_t scales_of(const Room& room, uint32_t stage) {
  return room.base - kScaleRoom + stage * kScaleBytes;
}

/// A lane's scales of one stage: rows lane, lane + 32, ... of the tile.
struct LaneScales {
  static constexpr int kCount = kMostFp8Rows / kScaleThreads;
  float of[kCount];
};
__device__ __forceinline__ LaneScales read_scales(const Fp8Scales& s, const std::byte* tile, int rows, int block) {
  LaneScales found;
#pragma unroll
  for (int i = 0; i < LaneScales::kCount; ++i) {
    const int row = lane() + i * kScaleThreads;
    found.of[i] = 0;
    if (row >= rows) continue;
    const std::byte* p = tile + row * s.row + block * s.block;
    // A byte is a float's exponent; 0 is 2^-127, whose float is not normal.
    if (s.ue8m0)
      found.of[i] = *p == std::byte{0} ? 0x1p-127F : __uint_as_float(static_cast<uint32_t>(*p) << 23);
    else
      found.of[i] = *reinterpret_cast<const float*>(p);
  }
  return found;
}

/// The warp that brings the scales of rows, one stage ahead of where it waits.
__device__ __forceinline__ void load_scales(const GroupedParams& p, const Room& room) {
  uint32_t slot = 0, parity = 1;
  for (int i = 0;; ++i) {
    const uint32_t entry = static_cast<uint32_t>(i & 1);
    ptx::mbarrier_wait(room.told(entry), static_cast<uint32_t>(i >> 1 & 1));
    const Tile t = read_entry(room.entry(entry));
    if (t.shape == kNoTile) break;
    ptx::mbarrier_arrive(room.taken(entry));
    const int rows = static_cast<int>(t.shape >> 16);
    const int64_t row = p.scales.rows_of_expert ? t.row - first_row_of(p.ranges, t.expert) : t.row;
    const std::byte* tile = p.scales.rows + t.expert * p.scales.expert + row * p.scales.row;
    LaneScales next = read_scales(p.scales, tile, rows, 0);
    for (int block = 0; block < p.inner_blocks; ++block) {
      const LaneScales now = next;
      if (block + 1 < p.inner_blocks) next = read_scales(p.scales, tile, rows, block + 1);
      ptx::mbarrier_wait(room.empty(slot), parity);
      const uint32_t scales = scales_of(room, slot);
#pragma unroll
      for (int k = 0; k < LaneScales::kCount; ++k)
        ptx::store_shared(scales + static_cast<uint32_t>(lane() + k * kScaleThreads) * 4, __float_as_uint(now.of[k]));
      ptx::mbarrier_arrive(room.full(slot));
      if (++slot == room.num_stages()) slot = 0, parity ^= 1;
    }
  }
}

/// A tile's scales of weights, of one stage after the other. Gated: of the gate and of the up half.
struct WeightScales {
  const float* first;
  const float* second;
};
template <class K>
__device__ __forceinline__ WeightScales weight_scales_of(const GroupedParams& p, const Tile& t) {
  const auto at = [&](int row) {
    const int inside = row < p.scales.weight_rows ? row : p.scales.weight_rows - 1;
    return p.scales.weights + (static_cast<int64_t>(t.expert) * p.scales.weight_rows + inside) * p.inner_blocks;
  };
  if constexpr (K::kGated) return {at(t.column_tile), at(p.gate_rows / kFp8Inner + t.column_tile)};
  const float* one = at(t.column_tile * 2 + math_group());
  return {one, one};
}

/// sums += product * scales: of the weights, and of the rows, which are columns of the product.
template <int kWidth>
__device__ __forceinline__ void add_scaled(float (&sums)[kWidth / 2], const float (&product)[kWidth / 2], uint32_t scales,
                                           float first, float second) {
#pragma unroll
  for (int i = 0; i < kWidth / 2; i += 4) {
    const float2 row = ptx::load_shared_pair(scales + static_cast<uint32_t>(i * 2 + (lane() & 3) * 2) * 4);
    sums[i] += product[i] * (row.x * first);
    sums[i + 1] += product[i + 1] * (row.y * first);
    sums[i + 2] += product[i + 2] * (row.x * second);
    sums[i + 3] += product[i + 3] * (row.y * second);
  }
}

template <class K, int kWidth>
__device__ __forceinline__ void multiply_tile(const GroupedParams& p, const Room& room, Position& at, uint32_t entry) {
  float sums[2][kWidth / 2];
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) sums[0][i] = sums[1][i] = 0;
  const WeightScales weights = weight_scales_of<K>(p, read_entry(entry));
  for (int block = 0; block < p.inner_blocks; ++block) {
    const float first = weights.first[block], second = weights.second[block];
    const Operands s = next_stage(room, at);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float product[kWidth / 2];
      ptx::wgmma_begin();
#pragma unroll
      for (int step = 0; step < kFp8Inner / 32; ++step) {
        const uint64_t a = s.weights + static_cast<uint64_t>(half) * ptx::operand_bytes(kQuarterBytes) +
                           ptx::kInnerStep * static_cast<uint64_t>(step);
        const uint64_t b = s.rows + ptx::kInnerStep * static_cast<uint64_t>(step);
        if (step == 0)
          ptx::WgmmaE4m3<kWidth>::first(product, a, b);
        else
          ptx::WgmmaE4m3<kWidth>::add(product, a, b);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::keep(product);
      add_scaled<kWidth>(sums[half], product, scales_of(room, at.slot), first, second);
    }
    __syncwarp();  // all lanes have read the scales
    release_stage(room, at.slot);
    advance(room, at);
  }
  const Tile t = read_entry(entry);
  store_half<K, kWidth>(p, room, t, 0, sums[0]);
  store_half<K, kWidth>(p, room, t, 1, sums[1]);
}

template <class K>
__global__ void __launch_bounds__(kThreads, 1) fp8_kernel(const __grid_constant__ GroupedParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  int* const first_tickets = reinterpret_cast<int*>(shared + p.shared_bytes) - (p.num_experts + 1);
  const int widest = count_tickets(p, first_tickets, first_tickets - 1);
  const Room room = make_room(base + kScaleRoom, p.shared_bytes - kScaleRoom, p.num_experts, widest);
  make_barriers(room, 1 + kScaleThreads, kMathThreads + 1 + kScaleThreads);
  __syncthreads();
  if (threadIdx.x >= kMathThreads) {
    ptx::give_registers<56>();
    if (threadIdx.x == kLoaderThread) load_tiles<K>(p, room);
    if (threadIdx.x == kClaimerThread) claim_tiles(p, room, first_tickets);
    if (threadIdx.x >= kFirstScaleThread && threadIdx.x < kFirstScaleThread + kScaleThreads) load_scales(p, room);
  } else {
    ptx::take_registers<224>();
    multiply_tiles<kMostFp8Rows>(
        room, [&]<int kWidth>(Position& at, uint32_t entry) { multiply_tile<K, kWidth>(p, room, at, entry); });
  }
}

}  // namespace switchyard::detail::gemm

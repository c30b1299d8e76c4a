// SPDX-License-Identifier: Apache-2.0
// Products of units of rows in the fused fp8 layer, for sm_90a. Rows are the first operand of the matrix instruction, 64 per
// unit, and weights the second. A thread therefore has two rows of a unit and thus two scales, whereas in kernel.cuh it has
// one scale per column. The products and sums, and thus the output bits, are the same in both.
//
// Two blocks form a cluster, which computes tiles of up to three units x 256 weights. Each block handles 128 of these weights
// for all rows and loads half of the rows into the shared memory of both blocks. A block has one warpgroup per unit. While a
// warpgroup adds a stage's product to its sums (no registers are then available for another product), the others keep the
// tensor cores busy.
//
// A block waits only for the other block, which runs concurrently: for its tiles, before overwriting rows that both read, and
// for outputs in a group to be quantized.
#pragma once

#include "arch/cuda/cluster.cuh"
#include "arch/cuda/cuda_quantize.cuh"
#include "gemm/gpu/fp8/kernel.cuh"

namespace switchyard::detail::gemm {

inline constexpr int kManyGroups = 3, kManyMathThreads = kManyGroups * 128, kManyMathWarps = kManyGroups * 4;
static_assert(kManyThreads == kManyMathThreads + 128 && kMaxManyRows == kManyGroups * kUnitRows);
inline constexpr int kBlockWeights = 128;                      // of a stage, in each block
inline constexpr uint32_t kUnitBytes = kUnitRows * kFp8Inner;  // rows of a unit
inline constexpr uint32_t kManyRowBytes = kMaxManyRows * kFp8Inner;
inline constexpr uint32_t kManyStageBytes = kManyRowBytes + kBlockWeights * kFp8Inner;
inline constexpr uint16_t kBothBlocks = 3;

/// `kTileFinish` has the same meaning as in the other kernel.
template <Finish kTileFinish>
struct ManyKind : Fp8Kind<kTileFinish> {
  using Fp8Kind<kTileFinish>::kGated;
  /// Staging bytes per warp: 8 bf16 rows, either of 64 outputs or of a group of 128.
  static constexpr uint32_t kWarpStaging = Fp8Kind<kTileFinish>::kQuantised ? 2048 : 1024;
  static constexpr uint32_t kFromOther = 1024;  ///< bytes of a group that the other block sends
};

/// Layout of shared memory: the barriers and slots of SharedStorage, staging, stages (rows, then weights), scales, and finally
/// the list of first tickets. A kind may fix the number of stages (kStages) to save registers.
template <class K>
struct ManySharedStorage : SharedStorage {
  static constexpr uint32_t kFixed = kFixedBytes + kManyMathWarps * K::kWarpStaging;

  __device__ uint32_t num_stages() const {
    if constexpr (requires { K::kStages; })
      return K::kStages;
    else
      return SharedStorage::num_stages();
  }

  __device__ uint32_t ready(int warp) const { return base + 384 + 8 * static_cast<uint32_t>(warp); }
  __device__ uint32_t free(int warp) const { return base + 512 + 8 * static_cast<uint32_t>(warp); }
  __device__ uint32_t warp_staging(int warp) const {
    return base + kFixedBytes + static_cast<uint32_t>(warp) * K::kWarpStaging;
  }
  __device__ uint32_t stage(uint32_t slot) const { return base + kFixed + slot * kManyStageBytes; }
  __device__ uint32_t scales(uint32_t slot) const { return stage(num_stages()) + slot * kScaleBytes<K>; }
};

/// Call before a cluster barrier. `loaders` and `readers` have the same meaning as in make_barriers().
template <class K>
__device__ __forceinline__ void make_many_barriers(const ManySharedStorage<K>& storage, uint32_t loaders, uint32_t readers) {
  make_barriers(storage, loaders, readers, 2 * kManyMathWarps);
  if (threadIdx.x != 0) return;
  ptx::mbarrier_init(storage.sent(0), 1);
  ptx::mbarrier_init(storage.sent(1), 1);
  for (int warp = 0; warp < kManyMathWarps; ++warp) {
    ptx::mbarrier_init(storage.ready(warp), 1);
    ptx::mbarrier_init(storage.free(warp), 1);
  }
  ptx::fence_mbarrier_init();
}

/// Sums of a thread. Warp w in a warpgroup has rows [16 w, 16 w + 16) of a unit. A thread holds rows lane / 4 and lane / 4 + 8
/// of these, and two of every eight of the 128 weights, as defined by Wgmma.
using UnitSums = float[kBlockWeights / 2];

/// sums += product * scales. `kAlike`: all weights have the same scale.
template <bool kAlike>
__device__ __forceinline__ void add_unit(UnitSums& sums, const UnitSums& product, float2 rows, float2 weights) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float weight = half == 0 || kAlike ? weights.x : weights.y;
    const float first = rows.x * weight, second = rows.y * weight;
#pragma unroll
    for (int j = 0; j < kBlockWeights / 4; j += 4) {
      const int i = half * (kBlockWeights / 4) + j;
      sums[i] += product[i] * first;
      sums[i + 1] += product[i + 1] * first;
      sums[i + 2] += product[i + 2] * second;
      sums[i + 3] += product[i + 3] * second;
    }
  }
}

/// Releases a stage that this warp has read, in both blocks, because the other block loads a part of it.
template <class AnyStorage>
__device__ __forceinline__ void release_in_both(const AnyStorage& storage, uint32_t slot) {
  if (lane() < 2) ptx::mbarrier_arrive_in_cluster(ptx::shared_of_block(storage.empty(slot), static_cast<uint32_t>(lane())));
}

/// Warpgroups take turns issuing the products of a stage, in a ring. Without this order, they would share the tensor cores
/// evenly, finish their products simultaneously, and then all add them to their sums while the tensor cores are idle.
inline constexpr int kTurnThreads = 2 * 128;  // the threads that pass a turn and those that take it
__device__ __forceinline__ void take_turn() { ptx::named_barrier(1 + math_group(), kTurnThreads); }
__device__ __forceinline__ void pass_turn() { ptx::named_barrier_arrive(1 + (math_group() + 1) % kManyGroups, kTurnThreads); }

/// Computes the sums of this warpgroup's unit. The scales for a stage's rows are preceded by the scales for `before` additional
/// rows.
template <class K>
__device__ __forceinline__ void multiply_unit(const GroupedParams& p, const ManySharedStorage<K>& storage, Position& at,
                                              UnitSums& sums, int before = 0) {
#pragma unroll
  for (int i = 0; i < kBlockWeights / 2; ++i) sums[i] = 0;
  // Descriptors of the first stage; those of later stages follow at multiples of kNextStage. Only the low halves of the
  // descriptors are stored, because all high halves are equal.
  constexpr uint32_t kNextStage = static_cast<uint32_t>(ptx::operand_bytes(kManyStageBytes));
  uint32_t first_rows =
               static_cast<uint32_t>(ptx::operand_at(storage.stage(0) + static_cast<uint32_t>(math_group()) * kUnitBytes)),
           first_weights = static_cast<uint32_t>(ptx::operand_at(storage.stage(0) + kManyRowBytes));
  uint32_t first_weight_scales = storage.scales(0) + kWeightScalesAt<K>;
  uint32_t first_row_scales =
      storage.scales(0) + static_cast<uint32_t>(before + math_group() * kUnitRows + warp_of_group() * 16 + lane() / 4) * 4;
  ptx::keep_register(first_rows);
  ptx::keep_register(first_weights);
  ptx::keep_register(first_weight_scales);
  ptx::keep_register(first_row_scales);
  const auto operand = [](uint32_t low) { return ptx::operand_at(0) >> 32 << 32 | low; };
  for (int block = 0; block < p.inner_blocks; ++block) {
    const uint32_t rows = first_rows + at.slot * kNextStage, weights = first_weights + at.slot * kNextStage;
    UnitSums product;
    ptx::mbarrier_wait(storage.full(at.slot), at.parity);
    take_turn();
    ptx::wgmma_begin();
#pragma unroll
    for (int step = 0; step < kFp8Inner / 32; ++step) {
      const uint32_t more = static_cast<uint32_t>(ptx::kInnerStep) * static_cast<uint32_t>(step);
      if (step == 0)
        ptx::WgmmaE4m3<kBlockWeights>::first(product, operand(rows), operand(weights));
      else
        ptx::WgmmaE4m3<kBlockWeights>::add(product, operand(rows + more), operand(weights + more));
    }
    ptx::wgmma_commit();
    pass_turn();
    const uint32_t row = first_row_scales + at.slot * kScaleBytes<K>;
    const float2 row_scales{ptx::load_shared_float(row), ptx::load_shared_float(row + 8 * 4)};
    const float2 weight_scales = ptx::load_shared_pair(first_weight_scales + at.slot * kScaleBytes<K>);
    __syncwarp();  // all lanes have read the scales
    ptx::wgmma_wait<0>();
    ptx::keep(product);
    release_in_both(storage, at.slot);
    add_unit<!K::kGated>(sums, product, row_scales, weight_scales);
    advance(storage, at);
  }
}

/// Stores 64 columns, starting at `column`, of this warp's 16 rows, the first `rows` of which exist. `value(i)` is output i of
/// this thread.
template <class Value>
__device__ __forceinline__ void store_warp_rows(const GroupedParams& p, uint32_t staging, int64_t row, int rows, int column,
                                                Value value) {
  const int piece = lane() % 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto two = [&](int i) { return pack<__nv_bfloat16>(value(i + half * 2), value(i + half * 2 + 1)); };
    __syncwarp();  // the previous contents have been read
#pragma unroll
    for (int first = 0; first < 8; first += 4)
      ptx::store_matrices(staging + staged_at<8>(lane() & 7, first + lane() / 8), two(first * 4), two(first * 4 + 4),
                          two(first * 4 + 8), two(first * 4 + 12));
    __syncwarp();
#pragma unroll
    for (int in_half = lane() / 8; in_half < 8; in_half += 4) {
      const int i = half * 8 + in_half;
      if (i >= rows || column + piece * 8 >= p.columns) continue;
      *reinterpret_cast<int4*>(p.out + (row + i) * p.columns + column + piece * 8) =
          ptx::load_shared_16(staging + staged_at<8>(in_half, piece));
    }
  }
}

/// Offset in a group: 16 rows of 128 bf16 outputs, staged by the same warp of both blocks, 8 rows each. Swizzled.
__device__ __forceinline__ uint32_t group_at(int row, int byte) {
  return static_cast<uint32_t>(row * 256 + (byte ^ (row & 7) << 4));
}

/// Stores this warp's 16 rows of a unit as fp8. A group of 128 outputs consists of 64 outputs from each block, so each block
/// receives all outputs of 8 rows. Outputs are first rounded to bf16, so that the bytes are identical to those of a separate
/// quantization. `parity` is the parity of the number of this warp's earlier calls.
template <class K, class Value>
__device__ __forceinline__ void store_warp_quantised(const GroupedParams& p, const ManySharedStorage<K>& storage, int64_t row,
                                                     int rows, int column_tile, uint32_t parity, Value value) {
  const int rank = static_cast<int>(ptx::cluster_rank()), warp = math_group() * 4 + warp_of_group();
  const uint32_t staging = storage.warp_staging(warp);
  ptx::mbarrier_wait(storage.free(warp), parity ^ 1);  // the other block has read the data that this one sent
  __syncwarp();
  const uint32_t there = ptx::shared_of_block(staging, static_cast<uint32_t>(rank) ^ 1),
                 bar = ptx::shared_of_block(storage.ready(warp), static_cast<uint32_t>(rank) ^ 1);
#pragma unroll
  for (int eight = 0; eight < 8; ++eight) {
    const uint32_t at = group_at(lane() / 4, (rank * 64 + eight * 8 + (lane() & 3) * 2) * 2);
    const uint32_t low = pack<__nv_bfloat16>(value(eight * 4), value(eight * 4 + 1)),
                   high = pack<__nv_bfloat16>(value(eight * 4 + 2), value(eight * 4 + 3));
    ptx::store_shared(staging + at, rank == 0 ? low : high);
    ptx::store_async(there + at, rank == 0 ? high : low, bar);
  }
  __syncwarp();
  if (lane() == 0) ptx::mbarrier_expect(storage.ready(warp), K::kFromOther);
  ptx::mbarrier_wait(storage.ready(warp), parity);
  constexpr int kLanes = 16;  // of a row, 8 columns each
  const int piece = lane() % kLanes, column = column_tile * 128 + piece * 8;
  const ScaleKind kind = p.quantised.ue8m0 ? ScaleKind::ue8m0 : ScaleKind::f32;
#pragma unroll 1
  for (int i = lane() / kLanes; i < 8; i += 32 / kLanes) {
    const int4 eight = ptx::load_shared_16(staging + group_at(i, piece * 16));
    RawColumns<1> raw{};
    raw.eight[0].low = {static_cast<uint32_t>(eight.x), static_cast<uint32_t>(eight.y), static_cast<uint32_t>(eight.z),
                        static_cast<uint32_t>(eight.w)};
    const QuantizedColumns<1> q = quantize_columns<DType::bf16, 1>(raw, kLanes, kind);
    if (rank * 8 + i >= rows || column >= p.columns) continue;
    store_group(p, row + rank * 8 + i, column_tile, column, piece == 0, q);
  }
  __syncwarp();
  if (lane() == 0) ptx::mbarrier_arrive_in_cluster(ptx::shared_of_block(storage.free(warp), static_cast<uint32_t>(rank) ^ 1));
}

/// Like multiply_unit(), for a tile in which this warpgroup has no unit.
template <class K>
__device__ __forceinline__ void skip_unit(const GroupedParams& p, const ManySharedStorage<K>& storage, Position& at) {
  for (int block = 0; block < p.inner_blocks; ++block) {
    ptx::mbarrier_wait(storage.full(at.slot), at.parity);
    take_turn();
    pass_turn();
    release_in_both(storage, at.slot);
    advance(storage, at);
  }
}

}  // namespace switchyard::detail::gemm

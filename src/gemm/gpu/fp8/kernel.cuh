// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM for sm_90a: fp8 e4m3 rows and weights, with scales of any ScaleGranularity. Outputs are bf16 or requantized to
// fp8. Roles: as in tile_roles.cuh, plus two warps that load scales.
//
// A stage covers 128 elements of the inner dimension, the range of one scale. Each stage's product is multiplied by both scales
// and added in float32. The tensor cores accumulate fp8 products with fewer bits than float32, so their sums never extend
// beyond one stage. A warpgroup multiplies the two halves of its 128 outputs one after the other, because the registers not
// used for the sums hold only one product; meanwhile, the other warpgroup keeps the tensor cores busy. Exception:
// with ScaleGranularity::per_channel, the tensor cores add the products of all stages to the sums.
#pragma once

#include "arch/cuda/cuda_quantize.cuh"
#include "gemm/gpu/fp8/scales.cuh"

namespace switchyard::detail::gemm {

template <Finish kTileFinish, ScaleGranularity kGranularity = ScaleGranularity::block>
struct Fp8Kind {
  using Element = __nv_bfloat16;
  static constexpr ptx::OperandOrder kOrder = ptx::OperandOrder::inner;
  static constexpr bool kQuantised = kTileFinish == Finish::quantised, kGated = kTileFinish == Finish::gated || kQuantised,
                        kActivated = kTileFinish == Finish::activated, kInterleaved = kGated;
  static constexpr int kStageElements = kFp8Inner;
  static constexpr int kColumns = kGated ? kTileColumns / 2 : kTileColumns;
  static constexpr ScaleGranularity kScaling = kGranularity;
  static constexpr int kScaleThreads = 64, kFirstScaleThread = kMathThreads + 64, kScaledRows = kMaxFp8Rows,
                       kWeightScales = kScaling == ScaleGranularity::block ? 4 : 0;
  /// Scales 2 g and 2 g + 1 apply to the outputs of warpgroup g. Gated: scales of the gate and up halves; otherwise the same
  /// scale twice.
  static __device__ int weight_scale(const GroupedParams& p, const Tile& t, int i) {
    return kGated ? t.column_tile + (i & 1) * (p.scales.weight_rows / 2) : t.column_tile * 2 + i / 2;
  }
  /// Gated: 8 weights of the gate half alternate with 8 of the up half.
  static __device__ int channel(const GroupedParams& p, const Tile& t, int i) {
    const int output = t.column_tile * kColumns + (kGated ? i / 16 * 8 + i % 8 : i);
    return output >= p.columns ? -1 : output + (kGated && (i & 8) != 0 ? p.gate_rows : 0);
  }
};

/// Scales precede the other shared memory: those of tiles, then those of stages.
template <class K>
struct Fp8SharedStorage : SharedStorage {
  static constexpr uint32_t kStageScaleBytes = kMaxFp8Rows * 4 + 32, kAllStages = kStageScales<K> ? 8192 : 0,
                            kScaleStorageBytes = kAllStages + 2 * kTileScaleBytes<K>;
  static_assert(8192 >= kStageScaleBytes * kMaxTileStages && kScaleStorageBytes % 1024 == 0);
  __device__ uint32_t scales(uint32_t slot) const { return base - kAllStages + slot * kStageScaleBytes; }
  __device__ uint32_t tile_scales(uint32_t slot) const { return base - kScaleStorageBytes + slot * kTileScaleBytes<K>; }
};

/// sums += product * weight scales * row scales; rows are columns of the product. `kAlike`: all weights have the scale `first`.
template <int kWidth, bool kAlike>
__device__ __forceinline__ void add_scaled(float (&sums)[kWidth / 2], const float (&product)[kWidth / 2], uint32_t scales,
                                           float first, float second) {
#pragma unroll
  for (int i = 0; i < kWidth / 2; i += 4) {
    const float2 row = ptx::load_shared_pair(scales + static_cast<uint32_t>(i * 2 + (lane() & 3) * 2) * 4);
    const float2 gate{row.x * first, row.y * first};
    const float2 up = kAlike ? gate : float2{row.x * second, row.y * second};
    sums[i] += product[i] * gate.x;
    sums[i + 1] += product[i + 1] * gate.y;
    sums[i + 2] += product[i + 2] * up.x;
    sums[i + 3] += product[i + 3] * up.y;
  }
}

/// Multiplies the sums of the block's tile number `tile` by the scales of the weights and, with per_channel, of the rows.
template <class K, int kWidth>
__device__ __forceinline__ void apply_tile_scales(const Fp8SharedStorage<K>& storage, uint32_t tile,
                                                  float (&sums)[2][kWidth / 2]) {
  const uint32_t scales = wait_tile_scales(storage, tile);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t own = scales + static_cast<uint32_t>(math_group() * 128 + half * 64 + warp_of_group() * 16 + lane() / 4) * 4;
    const float first = ptx::load_shared_float(own), second = ptx::load_shared_float(own + 8 * 4);
#pragma unroll
    for (int i = 0; i < kWidth / 2; i += 4) {
      float2 row{1, 1};
      if constexpr (!kStageScales<K>)
        row = ptx::load_shared_pair(scales + kTileRowScalesAt + static_cast<uint32_t>(i * 2 + (lane() & 3) * 2) * 4);
      sums[half][i] *= row.x * first;
      sums[half][i + 1] *= row.y * first;
      sums[half][i + 2] *= row.x * second;
      sums[half][i + 3] *= row.y * second;
    }
  }
}

/// Stores 8 columns of a row; one lane per group also stores the scale.
__device__ __forceinline__ void store_group(const GroupedParams& p, int64_t row, int group, int column, bool scale,
                                            const QuantizedColumns<1>& q) {
  *reinterpret_cast<uint2*>(p.quantised.rows + row * p.columns + column) = q.bytes[0];
  if (!scale) return;
  std::byte* const at = p.quantised.scales + row * p.quantised.row + group * p.quantised.block;
  if (p.quantised.ue8m0)
    *at = static_cast<std::byte>(q.scale);
  else
    *reinterpret_cast<uint32_t*>(at) = q.scale;
}

/// Fp8Outputs::fixed. Only kernels with scales per channel support it.
struct FixedScale {
  bool given;
  float scale, inverse;
};
template <class K>
__device__ __forceinline__ FixedScale fixed_scale(const GroupedParams& p) {
  if (!kTileScales<K> || p.quantised.fixed == nullptr) return {false, 1, 1};
  const float scale = *p.quantised.fixed;
  return {true, scale, __fdiv_rn(1.F, scale)};
}

/// Stores a tile's outputs as fp8 with one scale per row: the tile's columns form one group. Outputs are first rounded to bf16,
/// so that the bytes are identical to those of a separate quantization. Call from both warpgroups.
template <class K, int kWidth>
__device__ __forceinline__ void store_quantised(const GroupedParams& p, const SharedStorage& storage, const Tile& t,
                                                const float (&sums)[2][kWidth / 2]) {
  constexpr uint32_t kHalf = kWidth * 64;  // bytes of the rows of one half of a warpgroup
  constexpr int kLanes = 16;               // of a row, 8 columns each
  ptx::named_barrier(3, kMathThreads);     // the previous tile has been read
#pragma unroll
  for (int half = 0; half < 2; ++half)
    stage_outputs<K, kWidth, 32>(storage.staging(math_group()) + static_cast<uint32_t>(half) * kHalf,
                                 [&](int i) { return interleaved_output<kWidth>(p, sums[half], i); });
  ptx::named_barrier(3, kMathThreads);
  const int piece = static_cast<int>(threadIdx.x) % kLanes, rows = static_cast<int>(t.shape >> 16);
  const int column = t.column_tile * K::kColumns + piece * 8;
  const uint32_t part = storage.staging(piece / 8) + static_cast<uint32_t>(piece / 4 % 2) * kHalf;
  const ScaleKind kind = p.quantised.ue8m0 ? ScaleKind::ue8m0 : ScaleKind::f32;
  const FixedScale fixed = fixed_scale<K>(p);
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / kLanes; row < kWidth; row += kMathThreads / kLanes) {
    const int4 eight = ptx::load_shared_16(part + staged_at<4>(row, piece % 4));
    RawColumns<1> raw{};
    raw.eight[0].low = {static_cast<uint32_t>(eight.x), static_cast<uint32_t>(eight.y), static_cast<uint32_t>(eight.z),
                        static_cast<uint32_t>(eight.w)};
    QuantizedColumns<1> q;
    if (kTileScales<K> && fixed.given)
      q = quantize_fixed<DType::bf16, 1>(raw, fixed.scale, fixed.inverse);
    else
      q = quantize_columns<DType::bf16, 1>(raw, kLanes, kind);
    if (row >= rows || column >= p.columns) continue;
    store_group(p, t.row + row, t.column_tile, column, piece == 0 && (t.column_tile == 0 || !fixed.given), q);
  }
}

/// Enqueues products += 64 of this warpgroup's weights, those of half `half`, times the rows of a stage. `kFirst`: overwrites.
template <bool kFirst, int kWidth>
__device__ __forceinline__ void enqueue_stage(float (&product)[kWidth / 2], const Operands& s, int half) {
#pragma unroll
  for (int step = 0; step < kFp8Inner / 32; ++step) {
    const uint64_t a = s.weights + static_cast<uint64_t>(half) * ptx::operand_bytes(kQuarterBytes) +
                       ptx::kInnerStep * static_cast<uint64_t>(step);
    const uint64_t b = s.rows + ptx::kInnerStep * static_cast<uint64_t>(step);
    if (kFirst && step == 0)
      ptx::WgmmaE4m3<kWidth>::first(product, a, b);
    else
      ptx::WgmmaE4m3<kWidth>::add(product, a, b);
  }
}

/// Sums of a tile in which every stage has scales.
template <class K, int kWidth>
__device__ __forceinline__ void multiply_stages(const GroupedParams& p, const Fp8SharedStorage<K>& storage, Position& at,
                                                float (&sums)[2][kWidth / 2]) {
  for (int block = 0; block < p.inner_blocks; ++block) {
    const Operands s = next_stage(storage, at);
    const uint32_t scales = storage.scales(at.slot);
    float2 weights{1, 1};
    if constexpr (!kTileScales<K>)
      weights = ptx::load_shared_pair(scales + kWeightScalesAt<K> + static_cast<uint32_t>(math_group()) * 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float product[kWidth / 2];
      ptx::wgmma_begin();
      enqueue_stage<true, kWidth>(product, s, half);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::keep(product);
      add_scaled<kWidth, !K::kGated || kTileScales<K>>(sums[half], product, scales, weights.x, weights.y);
    }
    __syncwarp();  // all lanes have read the scales
    release_stage(storage, at.slot);
    advance(storage, at);
  }
}

/// Sums of a tile that the tensor cores add over all stages. The products of one stage are in flight while those of the next
/// one are enqueued.
template <class K, int kWidth>
__device__ __forceinline__ void multiply_unscaled(const GroupedParams& p, const Fp8SharedStorage<K>& storage, Position& at,
                                                  float (&sums)[2][kWidth / 2]) {
  uint32_t last = 0;
  for (int block = 0; block < p.inner_blocks; ++block) {
    const Operands s = next_stage(storage, at);
    enqueue_stage<false, kWidth>(sums[0], s, 0);
    enqueue_stage<false, kWidth>(sums[1], s, 1);
    ptx::wgmma_commit();
    if (block > 0) {
      ptx::wgmma_wait<1>();
      release_stage(storage, last);
    }
    last = at.slot;
    advance(storage, at);
  }
  ptx::wgmma_wait<0>();
  ptx::keep(sums[0]);
  ptx::keep(sums[1]);
  release_stage(storage, last);
}

/// `tile`: sequence number of the tile among those of the block.
template <class K, int kWidth>
__device__ __forceinline__ void multiply_tile(const GroupedParams& p, const Fp8SharedStorage<K>& storage, Position& at,
                                              uint32_t entry, uint32_t tile) {
  float sums[2][kWidth / 2];
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) sums[0][i] = sums[1][i] = 0;
  if constexpr (kStageScales<K>)
    multiply_stages<K, kWidth>(p, storage, at, sums);
  else
    multiply_unscaled<K, kWidth>(p, storage, at, sums);
  if constexpr (kTileScales<K>) apply_tile_scales<K, kWidth>(storage, tile, sums);
  const Tile t = read_entry(entry);
  if constexpr (K::kQuantised) {
    store_quantised<K, kWidth>(p, storage, t, sums);
  } else {
    store_half<K, kWidth>(p, storage, t, 0, sums[0]);
    store_half<K, kWidth>(p, storage, t, 1, sums[1]);
  }
}

template <class K>
__global__ void __launch_bounds__(kThreads, 1) fp8_kernel(const __grid_constant__ GroupedParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  int* const first_tickets = reinterpret_cast<int*>(shared + p.shared_bytes) - (p.num_experts + 1);
  const int widest = count_tickets(p, first_tickets, first_tickets - 1);
  constexpr uint32_t kScales = Fp8SharedStorage<K>::kScaleStorageBytes;
  const Fp8SharedStorage<K> storage{make_storage(base + kScales, p.shared_bytes - kScales, p.num_experts, widest)};
  make_barriers(storage, kStageLoaders<K>, kMathThreads + 1 + K::kScaleThreads);
  make_scale_barriers<K>(storage);
  __syncthreads();
  if (threadIdx.x >= kMathThreads) {
    ptx::dealloc_registers<56>();
    if (threadIdx.x == kLoaderThread) load_tiles<K>(p, storage);
    if (threadIdx.x == kClaimerThread) claim_tiles(p, storage, first_tickets);
    if (threadIdx.x >= K::kFirstScaleThread && threadIdx.x < K::kFirstScaleThread + K::kScaleThreads)
      load_scales<K>(p, storage);
  } else {
    ptx::alloc_registers<224>();
    uint32_t tile = 0;
    multiply_tiles<kMaxFp8Rows>(storage, [&]<int kWidth>(Position& at, uint32_t entry) {
      multiply_tile<K, kWidth>(p, storage, at, entry, tile);
      if constexpr (kTileScales<K>) ++tile;
    });
  }
}

}  // namespace switchyard::detail::gemm

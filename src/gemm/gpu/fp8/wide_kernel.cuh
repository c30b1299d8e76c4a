// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM for sm_90a: fp8 rows and weights, for experts with more than kFewFp8Rows rows. With exact sums, the products and
// sums, and thus the output bits, are those of kernel.cuh.
//
// Two blocks form a cluster, which computes the tiles of wide_tiles.hpp. A block multiplies up to 128 rows by 256 weights and
// loads half of the shared operand (weights or rows) into the shared memory of both blocks. Each of two warpgroups loads one
// unit of 64 rows into registers once per stage. Exact: it multiplies them by 128 weights at a time, because beside the sums
// registers remain for one such product. The warpgroups take turns issuing products, so one promotes its product while the
// other one occupies the tensor cores. Fast (Accumulate::fast): it multiplies them by all 256 weights into the sums. For scales
// per channel, see channel_sums.cuh.
//
// Roles: those of the claimer and loader of tile_roles.cuh, and two warps that load scales. Both blocks process the same tiles,
// which the first block claims. A block waits only for the other block, which runs concurrently: for its tiles, for its half of
// the shared operand, and before overwriting a stage that both read.
#pragma once

#include "gemm/gpu/fp8/channel_sums.cuh"

namespace switchyard::detail::gemm {

__device__ __forceinline__ void take_wide_turn() { ptx::named_barrier(1 + math_group(), kMathThreads); }
__device__ __forceinline__ void pass_wide_turn() { ptx::named_barrier_arrive(2 - math_group(), kMathThreads); }

/// sums += product * scales, for the first sums. `scales`: those of the thread's two rows, each times that of the weights.
template <int kCount>
__device__ __forceinline__ void add_half(float (&sums)[kHalfColumns / 2], const float (&product)[kCount], float2 scales) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    sums[i] += product[i] * scales.x;
    sums[i + 1] += product[i + 1] * scales.x;
    sums[i + 2] += product[i + 2] * scales.y;
    sums[i + 3] += product[i + 3] * scales.y;
  }
}

/// A thread's rows and scales of one stage.
template <class K>
struct WideOperands {
  uint32_t first_rows, first_scales, first_row_scales;  ///< addresses in the first stage
  uint32_t rows[16];                                    ///< of the current stage, as the matrix instruction expects them
  float2 row_scales, weight_scales;

  /// Operands of the warpgroup's unit `unit`. The scales of a stage's rows are preceded by those of `before` other rows.
  __device__ __forceinline__ WideOperands(const WideStorage<K>& storage, int unit, int before) {
    const int in_unit = warp_of_group() * 16 + (lane() & 15);
    first_rows = storage.stage(0) + kWideRowsAt + static_cast<uint32_t>(unit) * kUnitBytes +
                 static_cast<uint32_t>(in_unit * kFp8Inner + (lane() >> 4 ^ (in_unit & 7)) * 16);
    first_scales = storage.scales(0);
    first_row_scales = first_scales + static_cast<uint32_t>(before + unit * kUnitRows + warp_of_group() * 16 + lane() / 4) * 4;
    ptx::keep_register(first_rows);
    ptx::keep_register(first_row_scales);
  }
  /// Loads the operands of stage `slot`, which must be full. No product may be in flight. Release the stage to box copies only
  /// after the products that use the rows are complete; the rows have then been read.
  __device__ __forceinline__ void load(uint32_t slot) {
    const uint32_t from = first_rows + slot * kWideStageBytes, scales = slot * kScaleBytes<K>;
#pragma unroll
    for (int step = 0; step < kFp8Inner / 32; ++step) ptx::load_matrices(&rows[step * 4], from ^ (step * 32));
    row_scales = {ptx::load_shared_float(first_row_scales + scales), ptx::load_shared_float(first_row_scales + scales + 8 * 4)};
    if constexpr (!kTileScales<K>) weight_scales = ptx::load_shared_pair(first_scales + kWeightScalesAt<K> + scales);
  }
  /// Scales of the products of this thread's two rows with half `half` of the weights.
  __device__ __forceinline__ float2 scales(int half) const {
    if constexpr (kTileScales<K>) return row_scales;
    const float weight = half == 0 ? weight_scales.x : weight_scales.y;
    return {row_scales.x * weight, row_scales.y * weight};
  }
  /// Low half of the descriptor of a stage's weights. Because it is derived from a kernel parameter, the compiler can prove it
  /// uniform and computes it in uniform registers, as the instruction requires.
  static __device__ __forceinline__ uint32_t weights(const GroupedParams& p, uint32_t slot) {
    return static_cast<uint32_t>(ptx::operand_at(p.shared_base + WideStorage<K>::kStagesAt)) +
           slot * static_cast<uint32_t>(ptx::operand_bytes(kWideStageBytes));
  }
};

/// Enqueues d (+)= rows * 2 kCount weights. `zero` is 0 to overwrite d, and 1 to add.
template <int kCount>
__device__ __forceinline__ void enqueue_half(float (&d)[kCount], const uint32_t (&rows)[16], uint32_t weights, uint32_t zero) {
#pragma unroll
  for (int step = 0; step < kFp8Inner / 32; ++step)
    ptx::multiply_e4m3_rows(d, &rows[step * 4],
                            ptx::operand_at(0) >> 32 << 32 | (weights + static_cast<uint32_t>(ptx::kInnerStep) * step),
                            step == 0 ? zero : 1);
}
inline constexpr auto kNextHalf = static_cast<uint32_t>(ptx::operand_bytes(kHalfWeightBytes));

/// Computes the sums of this warpgroup's unit: each stage's product is multiplied by its scales and added in float32. `before`:
/// see WideOperands.
template <class K>
__device__ __forceinline__ void multiply_wide_unit(const GroupedParams& p, const WideStorage<K>& storage, Position& at,
                                                   WideSums& sums, int before = 0) {
#pragma unroll
  for (int i = 0; i < kHalfColumns / 2; ++i) sums.half[0][i] = sums.half[1][i] = 0;
  WideOperands<K> from(storage, math_group(), before);
  float product[kHalfColumns / 2];
#pragma unroll
  for (float& v : product) v = 0;
  const auto issue = [&](uint32_t weights) {
    take_wide_turn();
    ptx::wgmma_begin();
    enqueue_half(product, from.rows, weights, p.zero);
    ptx::wgmma_commit();
    pass_wide_turn();
  };
  ptx::mbarrier_wait(storage.full(at.slot), at.parity);
  from.load(at.slot);
#pragma unroll 1
  for (int left = p.inner_blocks; left > 0; --left) {
    const uint32_t slot = at.slot, weights = from.weights(p, slot);
    issue(weights);
    ptx::wgmma_wait<0>();
    ptx::keep(product);
    add_half(sums.half[0], product, from.scales(0));
    issue(weights + kNextHalf);
    const float2 second = from.scales(1);
    advance(storage, at);
    const bool more = left > 1, ready = more && ptx::mbarrier_try_wait(storage.full(at.slot), at.parity);
    ptx::wgmma_wait<0>();
    ptx::keep(product);
    release_in_both(storage, slot);
    if (more) {
      if (!ready) ptx::mbarrier_wait(storage.full(at.slot), at.parity);
      from.load(at.slot);
    }
    add_half(sums.half[1], product, second);
  }
}

/// Whether the warpgroups share the unit of a tile with one unit. Each then multiplies it by 64 weights of each half, into the
/// first 32 sums of each half, instead of one warpgroup by all weights.
template <class K>
inline constexpr bool kSharesUnits = K::kScaling == ScaleGranularity::block && !K::kFast;
inline constexpr int kSharedColumns = kHalfColumns / 2;

/// Computes this warpgroup's sums of a shared unit. `before`: see WideOperands.
template <class K>
__device__ __forceinline__ void multiply_shared_unit(const GroupedParams& p, const WideStorage<K>& storage, Position& at,
                                                     WideSums& sums, int before = 0) {
#pragma unroll
  for (int i = 0; i < kSharedColumns / 2; ++i) sums.half[0][i] = sums.half[1][i] = 0;
  WideOperands<K> from(storage, 0, before);
  const auto own = static_cast<uint32_t>(ptx::operand_bytes(kSharedColumns * kFp8Inner)) * static_cast<uint32_t>(math_group());
  float products[2][kSharedColumns / 2];
#pragma unroll
  for (int i = 0; i < kSharedColumns / 2; ++i) products[0][i] = products[1][i] = 0;
#pragma unroll 1
  for (int left = p.inner_blocks; left > 0; --left) {
    const uint32_t slot = at.slot, weights = __shfl_sync(~0u, from.weights(p, slot) + own, 0);  // in a uniform register
    ptx::mbarrier_wait(storage.full(slot), at.parity);
    from.load(slot);
    take_wide_turn();
    ptx::wgmma_begin();
    enqueue_half(products[0], from.rows, weights, p.zero);
    enqueue_half(products[1], from.rows, weights + kNextHalf, p.zero);
    ptx::wgmma_commit();
    pass_wide_turn();
    advance(storage, at);
    ptx::wgmma_wait<0>();
    ptx::keep(products[0]);
    ptx::keep(products[1]);
    release_in_both(storage, slot);
    add_half(sums.half[0], products[0], from.scales(0));
    add_half(sums.half[1], products[1], from.scales(1));
  }
}

/// sums *= factors, one per row.
__device__ __forceinline__ void scale_half(float (&sums)[kHalfColumns / 2], float2 factors) {
#pragma unroll
  for (int i = 0; i < kHalfColumns / 2; i += 4) {
    sums[i] *= factors.x;
    sums[i + 1] *= factors.x;
    sums[i + 2] *= factors.y;
    sums[i + 3] *= factors.y;
  }
}
/// Units of a thread's sums: the value of a sum is the sum times rows * weights, of its row (two) and half of the weights
/// (two).
struct WideUnits {
  float2 rows, weights;
};
/// Sets `unit` to `next` and returns the factor that converts sums to the new unit.
__device__ __forceinline__ float change_unit(float& unit, float next) {
  const float factor = __fdividef(unit, next);
  unit = next;
  return factor;
}
/// Changes the units to the scales of the stage in `from` and rescales the sums. Exceptions: if a row's scale is 0 or at most
/// kTooSmall times its unit, rescaling could overflow, so the row keeps its unit and its elements of this stage are set to 0 (a
/// group of zeros has scale 0 or, as UE8M0, 2^-127). Weights whose scale is 0 must be 0 and keep their unit.
template <class K>
__device__ __forceinline__ void change_units(WideSums& sums, WideUnits& units, WideOperands<K>& from) {
  constexpr float kTooSmall = 0x1p-32F;
  const bool first = fabsf(from.row_scales.x) <= fabsf(units.rows.x) * kTooSmall,
             second = fabsf(from.row_scales.y) <= fabsf(units.rows.y) * kTooSmall;
  if (__any_sync(~0u, first || second)) {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      if (first) from.rows[i] = 0;
      if (second) from.rows[i + 1] = 0;
    }
  }
  const float2 rows{first ? 1.F : change_unit(units.rows.x, from.row_scales.x),
                    second ? 1.F : change_unit(units.rows.y, from.row_scales.y)};
  const float low = from.weight_scales.x == 0 ? 1.F : change_unit(units.weights.x, from.weight_scales.x),
              high = from.weight_scales.y == 0 ? 1.F : change_unit(units.weights.y, from.weight_scales.y);
  scale_half(sums.half[0], {rows.x * low, rows.y * low});
  scale_half(sums.half[1], {rows.x * high, rows.y * high});
}

/// Like multiply_wide_unit(), but the tensor cores accumulate all products in the sums (Accumulate::fast). Between stages, the
/// sums are rescaled to the scales of the next stage.
template <class K>
__device__ __forceinline__ void multiply_wide_unit_fast(const GroupedParams& p, const WideStorage<K>& storage, Position& at,
                                                        WideSums& sums) {
#pragma unroll
  for (int i = 0; i < kHalfColumns / 2; ++i) sums.half[0][i] = sums.half[1][i] = 0;
  WideOperands<K> from(storage, math_group(), 0);
  ptx::mbarrier_wait(storage.full(at.slot), at.parity);
  from.load(at.slot);
  WideUnits units{from.row_scales, from.weight_scales};
#pragma unroll 1
  for (int left = p.inner_blocks; left > 0; --left) {
    const uint32_t slot = at.slot, weights = from.weights(p, slot);
    take_wide_turn();
    ptx::wgmma_begin();
    enqueue_half(sums.half[0], from.rows, weights, 1);
    enqueue_half(sums.half[1], from.rows, weights + kNextHalf, 1);
    ptx::wgmma_commit();
    pass_wide_turn();
    advance(storage, at);
    const bool more = left > 1, ready = more && ptx::mbarrier_try_wait(storage.full(at.slot), at.parity);
    ptx::wgmma_wait<0>();
    ptx::keep(sums.half[0]);
    ptx::keep(sums.half[1]);
    release_in_both(storage, slot);
    if (!more) break;
    if (!ready) ptx::mbarrier_wait(storage.full(at.slot), at.parity);
    from.load(at.slot);
    change_units(sums, units, from);
  }
  scale_half(sums.half[0], {units.rows.x * units.weights.x, units.rows.y * units.weights.x});
  scale_half(sums.half[1], {units.rows.x * units.weights.y, units.rows.y * units.weights.y});
}

/// Stores 64 columns, starting at `column`, of this warp's 16 rows, the first `rows` of which exist. `value(i)` is output i of
/// this thread. A box copy stores 16 rows. Fewer are stored row by row, because the next expert's rows follow them.
template <class Value>
__device__ __forceinline__ void store_wide_rows(const GroupedParams& p, uint32_t staging, int64_t row, int rows, int column,
                                                Value value) {
  const auto two = [&](int i) { return pack<__nv_bfloat16>(value(i), value(i + 1)); };
  if (lane() == 0) ptx::bulk_wait_read();  // of the previous columns
  __syncwarp();
  const int to = (lane() & 7) + (lane() >> 3 & 1) * 8;
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    ptx::store_matrices(staging + staged_at<8>(to, j + (lane() >> 4)), two(j * 4), two(j * 4 + 2), two(j * 4 + 4),
                        two(j * 4 + 6));
  ptx::fence_proxy_async_shared();
  __syncwarp();
  if (lane() == 0) {
    if (rows >= 16) ptx::store_box(&p.out_wide, staging, column, static_cast<int>(row));
    ptx::bulk_commit();
  }
  const int piece = lane() % 8;
  if (rows >= 16 || column + piece * 8 >= p.columns) return;
#pragma unroll 1
  for (int i = lane() / 8; i < rows; i += 4)
    *reinterpret_cast<int4*>(p.out + (row + i) * p.columns + column + piece * 8) =
        ptx::load_shared_16(staging + staged_at<8>(i, piece));
}

/// Stores this warp's 16 rows of a unit, the first `rows` of which exist, as fp8: a group of 128 outputs per row. Outputs are
/// first rounded to bf16, so that the bytes are identical to those of a separate quantization. `value(i)` is output i of this
/// thread.
template <class K, class Value>
__device__ __forceinline__ void store_wide_quantised(const GroupedParams& p, uint32_t staging, int64_t row, int rows, int group,
                                                     Value value) {
  const ScaleKind kind = p.quantised.ue8m0 ? ScaleKind::ue8m0 : ScaleKind::f32;
  const FixedScale fixed = fixed_scale<K>(p);
  constexpr uint32_t kEightRows = 8 * 128;
  const int piece = lane() % 8, column = group * 128 + piece * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t eight = staging + static_cast<uint32_t>(half) * kEightRows % K::kWarpStaging;
    // The four lanes that share a row have 32 outputs each: two adjacent ones of every eight.
    RawColumns<4> raw{};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const auto two = [&](int pair) {
        return pack<__nv_bfloat16>(value((e * 4 + pair) * 4 + half * 2), value((e * 4 + pair) * 4 + half * 2 + 1));
      };
      raw.eight[e].low = {two(0), two(1), two(2), two(3)};
    }
    QuantizedColumns<4> q;
    if (kTileScales<K> && fixed.given)
      q = quantize_fixed<DType::bf16, 4>(raw, fixed.scale, fixed.inverse);
    else
      q = quantize_columns<DType::bf16, 4>(raw, 4, kind);
    const int in_warp = half * 8 + lane() / 4;
    __syncwarp();  // the previous contents have been read
#pragma unroll
    for (int pair = 0; pair < 16; ++pair) {
      const uint2 bytes = q.bytes[pair / 4];
      const int in_group = pair * 8 + (lane() & 3) * 2;
      ptx::store_shared_half(eight + staged_at<8>(lane() / 4, in_group / 16) + static_cast<uint32_t>(in_group % 16),
                             static_cast<uint16_t>((pair % 4 < 2 ? bytes.x : bytes.y) >> (pair % 2 * 16)));
    }
    if ((lane() & 3) == 0 && in_warp < rows && group * 128 < p.columns && (group == 0 || !fixed.given)) {
      std::byte* const to = p.quantised.scales + (row + in_warp) * p.quantised.row + group * p.quantised.block;
      if (p.quantised.ue8m0)
        *to = static_cast<std::byte>(q.scale);
      else
        *reinterpret_cast<uint32_t*>(to) = q.scale;
    }
    __syncwarp();
#pragma unroll
    for (int i = lane() / 8; i < 8; i += 4) {
      if (half * 8 + i >= rows || column >= p.columns) continue;
      // Quantized outputs have a multiple of 16 columns.
      *reinterpret_cast<int4*>(p.quantised.rows + (row + half * 8 + i) * p.columns + column) =
          ptx::load_shared_16(eight + staged_at<8>(i, piece));
    }
  }
}

/// Like store_wide_quantised() for a shared unit: the warps of both warpgroups that have the same 16 rows exchange their 64
/// outputs per row, 8 rows at a time, and each quantizes half of these rows.
template <class K, class Value>
__device__ __forceinline__ void store_shared_quantised(const GroupedParams& p, const WideStorage<K>& storage, int64_t row,
                                                       int rows, int group, Value value) {
  constexpr int kLanes = 16;  // of a row, 8 columns each
  const int pair = warp_of_group(), piece = lane() % kLanes, column = group * 128 + piece * 8;
  const uint32_t own = storage.warp_staging(math_group() * 4 + pair), read = storage.warp_staging(piece / 8 * 4 + pair);
  const ScaleKind kind = p.quantised.ue8m0 ? ScaleKind::ue8m0 : ScaleKind::f32;
  const auto meet = [&] {
    __syncwarp();
    ptx::named_barrier(3 + pair, 64);
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto two = [&](int i) { return pack<__nv_bfloat16>(value(i * 4 + half * 2), value(i * 4 + half * 2 + 1)); };
#pragma unroll
    for (int first = 0; first < 8; first += 4)
      ptx::store_matrices(own + staged_at<8>(lane() & 7, first + lane() / 8), two(first), two(first + 1), two(first + 2),
                          two(first + 3));
    meet();
#pragma unroll 1
    for (int i = math_group() * 4 + lane() / kLanes; i < math_group() * 4 + 4; i += 2) {
      const int4 eight = ptx::load_shared_16(read + staged_at<8>(i, piece % 8));
      RawColumns<1> raw{};
      raw.eight[0].low = {static_cast<uint32_t>(eight.x), static_cast<uint32_t>(eight.y), static_cast<uint32_t>(eight.z),
                          static_cast<uint32_t>(eight.w)};
      const QuantizedColumns<1> q = quantize_columns<DType::bf16, 1, true>(raw, kLanes, kind);
      if (half * 8 + i >= rows || column >= p.columns) continue;
      store_group(p, row + half * 8 + i, group, column, piece == 0, q);
    }
    meet();  // both warps have read these rows: the next ones, possibly of the next tile, may overwrite them
  }
}

/// Computes and stores this warpgroup's part of the block's tile, which has one unit.
template <class K>
__device__ __forceinline__ void multiply_shared_tile(const GroupedParams& p, const WideStorage<K>& storage, Position& at,
                                                     uint32_t entry) {
  WideSums sums;
  multiply_shared_unit(p, storage, at, sums);
  const Tile t = read_entry(entry);
  const int first = warp_of_group() * 16, rows = static_cast<int>(t.shape >> 16) - first;
  const auto value = [&](int i) { return gated(p.gating, sums.half[0][i], sums.half[1][i]); };
  if constexpr (K::kQuantised) {
    store_shared_quantised<K>(p, storage, t.row + first, rows, t.column_tile, value);
  } else {
    const uint32_t staging = storage.warp_staging(static_cast<int>(threadIdx.x >> 5));
    const int column = t.column_tile * K::kColumns + math_group() * kSharedColumns;
    if constexpr (K::kGated) {
      store_wide_rows(p, staging, t.row + first, rows, column, value);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_wide_rows(p, staging, t.row + first, rows, column + half * kHalfColumns,
                        [&](int i) { return activated<K>(p, sums.half[half][i]); });
    }
  }
}

/// Computes and stores this warpgroup's unit of the block's tile number `tile`.
template <class K>
__device__ __forceinline__ void multiply_wide_tile(const GroupedParams& p, const WideStorage<K>& storage, Position& at,
                                                   uint32_t entry, uint32_t tile) {
  WideSums sums;
  if constexpr (!kStageScales<K>)
    multiply_wide_unit_unscaled(p, storage, at, sums);
  else if constexpr (K::kFast)
    multiply_wide_unit_fast(p, storage, at, sums);
  else
    multiply_wide_unit(p, storage, at, sums);
  if constexpr (kTileScales<K>) apply_wide_tile_scales(storage, tile, sums);
  const Tile t = read_entry(entry);
  const int first = math_group() * kUnitRows + warp_of_group() * 16, rows = static_cast<int>(t.shape >> 16) - first;
  const uint32_t staging = storage.warp_staging(static_cast<int>(threadIdx.x >> 5));
  if constexpr (K::kQuantised) {
    store_wide_quantised<K>(p, staging, t.row + first, rows, t.column_tile,
                            [&](int i) { return gated(p.gating, sums.half[0][i], sums.half[1][i]); });
  } else {
    constexpr int kQuarters = K::kColumns / 64;
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; ++quarter)
      store_wide_rows(p, staging, t.row + first, rows, t.column_tile * K::kColumns + quarter * 64, [&](int i) {
        const int at_half = quarter % 2 * (kHalfColumns / 4) + i;
        if constexpr (K::kGated)
          return gated(p.gating, sums.half[0][at_half], sums.half[1][at_half]);
        else
          return activated<K>(p, sums.half[quarter / 2][at_half]);
      });
  }
}

/// Takes and passes the turns and releases the stages of a tile in which this warpgroup has no unit.
template <class K>
__device__ __forceinline__ void skip_wide_unit(const GroupedParams& p, const WideStorage<K>& storage, Position& at) {
  for (int block = 0; block < p.inner_blocks; ++block) {
    for (int turn = 0; turn < K::kTurns; ++turn) {
      take_wide_turn();
      pass_wide_turn();
    }
    ptx::mbarrier_wait(storage.full(at.slot), at.parity);
    release_in_both(storage, at.slot);
    advance(storage, at);
  }
}

/// Role of each math warp. In tiles with one unit, the warpgroups share it or, if they cannot, the second one has no unit.
template <class K>
__device__ __forceinline__ void multiply_wide_tiles(const GroupedParams& p, const WideStorage<K>& storage) {
  Position at;
  if (K::kTurns > 0 && math_group() == 1) pass_wide_turn();
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1), entry = storage.entry(slot);
    ptx::mbarrier_wait(storage.announced(slot), static_cast<uint32_t>(i >> 1 & 1));
    const auto shape = static_cast<uint32_t>(__shfl_sync(~0u, ptx::load_shared_16(entry).w, 0));
    if (shape == kNoTile) {
      if (K::kTurns > 0 && math_group() == 0) take_wide_turn();  // consumes the other group's last pass
      break;
    }
    at.slot = __shfl_sync(~0u, at.slot, 0);  // provably uniform: see WideStorage::kStages
    const int units = wide_units(shape & 0xffff);
    bool shared = false;
    if constexpr (kSharesUnits<K>) {
      shared = units == 1;
      if (shared) multiply_shared_tile(p, storage, at, entry);
    }
    if (!shared && math_group() < units)
      multiply_wide_tile(p, storage, at, entry, static_cast<uint32_t>(i));
    else if (!shared)
      skip_wide_unit(p, storage, at);
    ptx::mbarrier_arrive(storage.taken(slot));
  }
  if (lane() == 0) ptx::bulk_wait();
}

template <class K>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(2, 1, 1)
    fp8_wide_kernel(const __grid_constant__ GroupedParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  // Without the shuffle, the compiler recomputes the address at each use, with a slow read of a special register.
  const uint32_t base = __shfl_sync(~0u, ptx::shared_address(shared), 0);
  int* const first_tickets = reinterpret_cast<int*>(shared + p.shared_bytes) - (p.num_experts + 1);
  count_tickets(p, first_tickets, first_tickets - 1,
                [&](int64_t rows) { return static_cast<int>(count_wide_tiles(rows, p.column_tiles)); });
  const WideStorage<K> storage(base);
  make_barriers(storage, kStageLoaders<K>, kMathThreads + 1 + K::kScaleThreads, 2 * kMathWarps);
  make_scale_barriers<K>(storage);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(storage.sent(0), 1);
    ptx::mbarrier_init(storage.sent(1), 1);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_barrier();
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread >= kMathThreads) {
    ptx::dealloc_registers<56>();
    if (thread == kLoaderThread) load_wide_tiles(p, storage);
    if (thread == kClaimerThread)
      announce_tiles(p, storage, [&](uint32_t ticket) { return wide_tile_of(p, first_tickets, ticket); });
    if (thread >= K::kFirstScaleThread) load_scales<K>(p, storage);
    __syncwarp();
  } else {
    ptx::alloc_registers<224>();
    multiply_wide_tiles(p, storage);
  }
  ptx::cluster_barrier();  // the other block no longer accesses this one's shared memory
}

}  // namespace switchyard::detail::gemm

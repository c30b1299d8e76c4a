// SPDX-License-Identifier: Apache-2.0
// Weighted sums of rows that are fetched by bulk copies: while the lanes sum one piece of all rows out of shared memory, the next
// piece is on its way. A load over NVLink takes microseconds; registers alone can't hold enough of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/cuda/cuda_rows.cuh"
#include "arch/cuda/ptx.cuh"
#include "arch/ops.hpp"

namespace switchyard::detail {

/// Two halves of a warp's stages, and the barriers that their loads complete on.
struct ReduceStage {
  uint32_t at;          ///< shared address, 16-byte aligned
  uint32_t half_bytes;  ///< multiple of 16
  uint32_t bars;        ///< shared address of two mbarriers
};

/// Bytes of each row in one piece, or 0 if the rows do not suit: then reduce_rows_lanes does it.
__device__ inline uint32_t reduce_piece_bytes(const ReduceSpec& spec, const ReduceStage& stage, int64_t row_bytes) {
  constexpr uint32_t kLeast = 512;  // 16 bytes per lane
  if (spec.n == 0 || row_bytes % 16 != 0 || row_bytes < 2 * kLeast) return 0;
  uintptr_t low_bits = reinterpret_cast<uintptr_t>(spec.out) | reinterpret_cast<uintptr_t>(spec.bias[0]) |
                       reinterpret_cast<uintptr_t>(spec.bias[1]);
  bool global = true;
  for (int i = 0; i < spec.n; ++i) {
    low_bits |= reinterpret_cast<uintptr_t>(spec.rows[i]);
    global = global && __isGlobal(spec.rows[i]);
  }
  if ((low_bits & 15u) != 0 || !global) return 0;
  uint32_t piece = stage.half_bytes / static_cast<uint32_t>(spec.n) / kLeast * kLeast;
  const auto row = static_cast<uint32_t>((row_bytes + kLeast - 1) / kLeast * kLeast);
  return piece < row ? piece : row;
}

/// Lane i fetches piece [at, at + bytes) of rows i, i + 32, ... into half `half`.
__device__ inline void reduce_fetch(int lane, const ReduceSpec& spec, const ReduceStage& stage, uint32_t half, int64_t at,
                                    uint32_t bytes, uint32_t piece) {
  const uint32_t bar = stage.bars + half * 8;
  if (lane == 0) ptx::mbarrier_expect(bar, bytes * static_cast<uint32_t>(spec.n));
  __syncwarp();
  for (int i = lane; i < spec.n; i += 32)
    ptx::bulk_load(stage.at + half * stage.half_bytes + static_cast<uint32_t>(i) * piece,
                   static_cast<const std::byte*>(spec.rows[i]) + at, bytes, bar);
}

/// Sums one fetched piece, 16 bytes per lane at a time; the piece starts at byte `at` of the row.
template <DType T>
__device__ void reduce_piece(int lane, const ReduceSpec& spec, uint32_t from, int64_t at, uint32_t bytes, uint32_t piece) {
  using E = RowElements<T>;
  const int64_t first = at / 16;
  for (uint32_t v = static_cast<uint32_t>(lane); v < bytes / 16; v += 32) {
    float sum[E::kPerVector], x[E::kPerVector];
#pragma unroll
    for (int e = 0; e < E::kPerVector; ++e) sum[e] = 0.0f;
    if (spec.bias[0] != nullptr) E::widen(static_cast<const uint4*>(spec.bias[0])[first + v], sum);
    if (spec.bias[1] != nullptr) {
      E::widen(static_cast<const uint4*>(spec.bias[1])[first + v], x);
#pragma unroll
      for (int e = 0; e < E::kPerVector; ++e) sum[e] = __fadd_rn(sum[e], x[e]);
    }
#pragma unroll 4
    for (int i = 0; i < spec.n; ++i) {
      E::widen(ptx::load_shared(from + static_cast<uint32_t>(i) * piece + v * 16), x);
      if (spec.weights != nullptr) {
        const float weight = spec.weights[i];
#pragma unroll
        for (int e = 0; e < E::kPerVector; ++e) x[e] = __fmul_rn(weight, x[e]);
      }
#pragma unroll
      for (int e = 0; e < E::kPerVector; ++e) sum[e] = __fadd_rn(sum[e], x[e]);
    }
    static_cast<uint4*>(spec.out)[first + v] = E::narrow(sum);
  }
}

/// `parity`: bit h is the parity of the next completion of half h's barrier. All earlier bulk stores out of the stages have been
/// read. On return no load is under way.
template <DType T>
__device__ void reduce_rows_bulk(int lane, const ReduceSpec& spec, const ReduceStage& stage, int64_t row_bytes, uint32_t piece,
                                 uint32_t& parity) {
  const auto bytes_at = [&](int64_t at) {
    return static_cast<uint32_t>(row_bytes - at < piece ? row_bytes - at : int64_t{piece});
  };
  for (uint32_t h = 0; h < 2 && int64_t{h} * piece < row_bytes; ++h)
    reduce_fetch(lane, spec, stage, h, int64_t{h} * piece, bytes_at(int64_t{h} * piece), piece);
  uint32_t half = 0;
  for (int64_t at = 0; at < row_bytes; at += piece) {
    while (!ptx::mbarrier_try_wait(stage.bars + half * 8, (parity >> half) & 1u)) {
    }
    parity ^= 1u << half;
    reduce_piece<T>(lane, spec, stage.at + half * stage.half_bytes, at, bytes_at(at), piece);
    __syncwarp();  // all lanes have read the half before it is filled again
    const int64_t next = at + 2 * int64_t{piece};
    if (next < row_bytes) reduce_fetch(lane, spec, stage, half, next, bytes_at(next), piece);
    half ^= 1u;
  }
}

__device__ __noinline__ inline void reduce_rows_bulk(int lane, const ReduceSpec& spec, const ReduceStage& stage,
                                                     int64_t row_bytes, uint32_t piece, uint32_t& parity) {
  switch (spec.type) {
    case DType::bf16: return reduce_rows_bulk<DType::bf16>(lane, spec, stage, row_bytes, piece, parity);
    case DType::f16: return reduce_rows_bulk<DType::f16>(lane, spec, stage, row_bytes, piece, parity);
    case DType::f32: return reduce_rows_bulk<DType::f32>(lane, spec, stage, row_bytes, piece, parity);
    case DType::fp8_e4m3: return;
  }
}

}  // namespace switchyard::detail

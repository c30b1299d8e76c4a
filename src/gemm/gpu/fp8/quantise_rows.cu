// SPDX-License-Identifier: Apache-2.0
#include "gemm/gpu/quantise_rows.hpp"

#include "arch/cuda/cuda_quantize.cuh"
#include "gemm/gpu/each_row.cuh"

namespace switchyard::detail::gemm {
namespace {

constexpr int kBlock = 1024, kTeam = 256, kTeams = kBlock / kTeam, kTeamWarps = kTeam / 32;
constexpr int kRound = kTeam * 8;  // columns that a team reads at once
constexpr int kHeld = 4;           // rounds kept in registers; the columns after them are read twice

/// Properties of a row, or of a part of it. `amax`: bits of the largest finite magnitude in bf16.
struct RowExtent {
  uint32_t amax = 0, infinite = 0, nan = 0;

  __device__ __forceinline__ void add(uint32_t pair) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t bits = (i == 0 ? pair : pair >> 16) & 0x7fffu;
      infinite |= bits == 0x7f80u ? 1u : 0u;
      nan |= bits > 0x7f80u ? 1u : 0u;
      amax = max(amax, bits < 0x7f80u ? bits : 0u);
    }
  }
  __device__ __forceinline__ void add(const uint4& eight) {
    add(eight.x);
    add(eight.y);
    add(eight.z);
    add(eight.w);
  }
  __device__ __forceinline__ uint32_t bits() const { return amax | infinite << 16 | nan << 17; }
  static __device__ __forceinline__ uint32_t merge(uint32_t a, uint32_t b) {
    return max(a & 0xffffu, b & 0xffffu) | ((a | b) & 0xffff0000u);
  }
};

struct RowScale {
  float scale, inverse;
  bool exact;  ///< divide_by() does not apply
};
__device__ __forceinline__ RowScale scale_of(uint32_t extent) {
  const float amax = __uint_as_float((extent & 0xffffu) << 16);
  float scale = __fdiv_rn(amax, kE4m3Max);
  if (scale == 0.F && (extent >> 16 & 1) != 0) scale = 1;
  return {scale, scale == 0.F ? 0.F : __fdiv_rn(1.F, scale), extent >> 16 != 0 || !(scale >= kSmallestFastScale)};
}
__device__ __forceinline__ uint2 quantise_eight(const uint4& raw, const RowScale& s) {
  float x[8];
  RowElements<DType::bf16>::widen(raw, x);
  const auto one = [&](float v) -> uint32_t {
    if (isnan(v)) return kE4m3Nan;
    return s.scale == 0.F ? 0u : e4m3_pair(__fdiv_rn(v, s.scale), 0.F) & 0xffu;
  };
  const auto four = [&](int i) {
    if (s.exact) return one(x[i]) | one(x[i + 1]) << 8 | one(x[i + 2]) << 16 | one(x[i + 3]) << 24;
    const auto pair = [&](int j) {
      return e4m3_pair(divide_by(x[j], s.scale, s.inverse), divide_by(x[j + 1], s.scale, s.inverse));
    };
    const uint32_t low = i == 0 ? raw.x : raw.z, high = i == 0 ? raw.y : raw.w;
    return ((pair(i) | pair(i + 2) << 16) & 0x7f7f7f7fu) | (__byte_perm(low, high, 0x7531) & 0x80808080u);
  };
  return {four(0), four(4)};
}

/// Merges the extents of a team's threads. `parity` alternates between calls, so that one barrier suffices.
__device__ __forceinline__ uint32_t extent_of_team(uint32_t own, int team, int parity) {
  __shared__ uint32_t parts[2][kTeams][kTeamWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own = RowExtent::merge(own, __shfl_xor_sync(~0u, own, step));
  if (lane() == 0) parts[parity][team][threadIdx.x / 32 % kTeamWarps] = own;
  ptx::named_barrier(1 + team, kTeam);
#pragma unroll
  for (int w = 0; w < kTeamWarps; ++w) own = RowExtent::merge(own, parts[parity][team][w]);
  return own;
}

__device__ __forceinline__ void quantise_row(const RowQuantising& q, int64_t row, int parity) {
  const int team = static_cast<int>(threadIdx.x) / kTeam, thread = static_cast<int>(threadIdx.x) % kTeam;
  const auto columns = static_cast<int>(q.columns);
  const auto* const from = static_cast<const uint16_t*>(q.from) + row * q.columns;
  auto* const to = static_cast<uint8_t*>(q.to) + row * q.columns;
  const auto load = [&](int c) { return c < columns ? *reinterpret_cast<const uint4*>(from + c) : uint4{}; };
  uint4 held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) held[i] = load(i * kRound + thread * 8);
  RowExtent extent;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) extent.add(held[i]);
  const int rest = kHeld * kRound + thread * 8;
#pragma unroll 1
  for (int c = rest; c < columns; c += kRound) extent.add(load(c));
  const RowScale scale = scale_of(extent_of_team(extent.bits(), team, parity));
  const auto store = [&](int c, const uint4& raw) {
    if (c < columns) *reinterpret_cast<uint2*>(to + c) = quantise_eight(raw, scale);
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) store(i * kRound + thread * 8, held[i]);
#pragma unroll 1
  for (int c = rest; c < columns; c += kRound) store(c, load(c));
  for (int i = thread; i < q.copies; i += kTeam) q.scales[row * q.scale_words + i] = scale.scale;
}

__global__ void __launch_bounds__(kBlock, 1)
    quantise_expert_rows(const __grid_constant__ RowQuantising q, const __grid_constant__ RowRanges ranges, int num_experts) {
  int parity = 0;
  for_each_row_of<kBlock, kTeam>(ranges, num_experts, [&](int64_t row) { quantise_row(q, row, parity ^= 1); });
}
__global__ void __launch_bounds__(kBlock, 1)
    quantise_first_rows(const __grid_constant__ RowQuantising q, const int32_t* device_rows) {
  int64_t rows = q.rows;
  if (device_rows != nullptr) rows = min(rows, static_cast<int64_t>(*device_rows));
  int parity = 0;
  for (int64_t row = threadIdx.x / kTeam * gridDim.x + blockIdx.x; row < rows; row += int64_t{gridDim.x} * kTeams)
    quantise_row(q, row, parity ^= 1);
}

}  // namespace

gpu::Status quantise_rows(const RowQuantising& of, const RowRanges& ranges, int num_experts, int blocks, gpu::Stream stream) {
  return gpu::launch(quantise_expert_rows, {blocks, kBlock}, stream, of, ranges, num_experts);
}
gpu::Status quantise_rows(const RowQuantising& of, const int32_t* device_rows, int blocks, gpu::Stream stream) {
  return gpu::launch(quantise_first_rows, {blocks, kBlock}, stream, of, device_rows);
}
gpu::Status load_quantise_rows() {
  const gpu::Status loaded = gpu::allow_shared(quantise_expert_rows, 0);
  return loaded == gpu::kOk ? gpu::allow_shared(quantise_first_rows, 0) : loaded;
}

}  // namespace switchyard::detail::gemm

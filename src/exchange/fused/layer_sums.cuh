// SPDX-License-Identifier: Apache-2.0
// Sums of a token's rows, by any warp of a block.
#pragma once

#include <cuda_bf16.h>

#include "exchange/fused/layer_room.cuh"

namespace switchyard::detail::fused {

__device__ __forceinline__ void widen(const uint4& v, float (&x)[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void add_weighted(const uint4& v, float weight, bool weighted, float (&sum)[8]) {
  float x[8];
  widen(v, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(sum[i], weighted ? __fmul_rn(weight, x[i]) : x[i]);
}

__device__ __forceinline__ uint4 rounded(const float (&sum)[8]) {
  return {gemm::pack<__nv_bfloat16>(sum[0], sum[1]), gemm::pack<__nv_bfloat16>(sum[2], sum[3]),
          gemm::pack<__nv_bfloat16>(sum[4], sum[5]), gemm::pack<__nv_bfloat16>(sum[6], sum[7])};
}

/// Adds vectors v, v + 32, ... below `end` of the rows of the lanes in `left`, ascending; `at` and `weight`: of this lane's
/// row.
template <int kVectors, int kAtOnce>
__device__ __forceinline__ void add_rows(uint32_t left, const std::byte* at, float weight, bool weighted, int v, int end,
                                         float (&sum)[kVectors][8]) {
  while (left != 0) {
    const int n = __popc(left);
    uint4 x[kAtOnce][kVectors];
    float w[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (j >= n) break;
      const int k = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      w[j] = __shfl_sync(~0u, weight, k);
      const auto* const from = reinterpret_cast<const uint4*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(at), k));
#pragma unroll
      for (int u = 0; u < kVectors; ++u)
        if (v + 32 * u < end) x[j][u] = __ldcs(from + v + 32 * u);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (j >= n) break;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) add_weighted(x[j][u], w[j], weighted, sum[u]);
    }
  }
}

/// Sums of tokens out of their routes' rows, k ascending, in float32 from +0 or the row of `out`, rounded once: as combine
/// per_route. kVectors of 16 bytes of each row, of kAtOnce rows, are under way in each lane.
template <class A, int kVectors, int kAtOnce>
__device__ __forceinline__ void sum_tokens(const LayerCall& c) {
  const FusedParams& p = c.p;
  const CallContext& call = p.call;
  const int64_t row_bytes = p.layout.row_bytes;
  constexpr int kParts = 2;
  const int vectors = static_cast<int>(row_bytes / 16), each = (vectors + kParts - 1) / kParts;
  for (;;) {
    const int64_t item = take(&p.memory.counters->sums, 1);
    if (item >= c.tokens * kParts) break;
    const int64_t t = item / kParts;
    const int part = static_cast<int>(item % kParts);
    const int64_t f = t * p.layout.topk + lane();
    const int32_t id = lane() < p.layout.topk ? p.ids[f] : -1, row = id >= 0 ? p.route_row[f] : -1;
    const float weight = row >= 0 && p.weights != nullptr ? p.weights[f] : 1.f;
    const int owner = row >= 0 ? p.map.owner(id) : call.rank();
    const uint64_t* const flag = call.heap.local(p.layout.returned(row >= 0 ? f : 0));
    if (!wait_until<A>(c, Site::layer_returned, Event::wait_returned, owner,
                       [&] { return row < 0 || flag_reached(ptx::load_acquire<Scope::system>(flag), c.word); }))
      return;
    __syncwarp();
    const std::byte* at = nullptr;
    if (row >= 0) at = owner == call.rank() ? p.memory.y + row * row_bytes : call.heap.local(p.layout.inbox(f));
    const RoleSpan<A> span(Event::sum_returned);
    const uint32_t kept = __ballot_sync(~0u, row >= 0);
    const int end = (part + 1) * each < vectors ? (part + 1) * each : vectors;
    for (int v = part * each + lane(); v - lane() < end; v += 32 * kVectors) {
      float sum[kVectors][8] = {};
      auto* const out = reinterpret_cast<uint4*>(p.out + t * row_bytes) + v;
      if (p.add) {
#pragma unroll
        for (int u = 0; u < kVectors; ++u)
          if (v + 32 * u < end) widen(out[32 * u], sum[u]);
      }
      add_rows<kVectors, kAtOnce>(kept, at, weight, p.weights != nullptr, v, end, sum);
#pragma unroll
      for (int u = 0; u < kVectors; ++u)
        if (v + 32 * u < end) out[32 * u] = rounded(sum[u]);
    }
    span.end(__popc(kept));
  }
}

}  // namespace switchyard::detail::fused

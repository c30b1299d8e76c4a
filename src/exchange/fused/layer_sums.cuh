// SPDX-License-Identifier: Apache-2.0
// Sums a token's rows; any warp of a block may do so.
#pragma once

#include <cuda_bf16.h>

#include "arch/bits.hpp"
#include "exchange/fused/layer_storage.cuh"

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

/// Adds the vectors v, v + 32, ... below `end` of the rows held by the lanes in `left`, in ascending order. `at` and `weight`
/// belong to this lane's row.
template <int kVectors, int kAtOnce>
__device__ __forceinline__ void add_rows(uint32_t left, const std::byte* at, float weight, bool weighted, int v, int end,
                                         float (&sum)[kVectors][8]) {
  while (left != 0) {
    const int n = __popc(left);
    uint4 x[kAtOnce][kVectors];
    float w[kAtOnce] = {};  // Uninitialized, it would occupy registers throughout the kernel.
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

/// The token route held by a lane; per_rank: without its weight.
struct SummedRoute {
  int32_t id = -1, row = -1;
  float weight = 1.f;
};
template <bool kPerRank>
__device__ __forceinline__ SummedRoute summed_route(const LayerCall& c, int64_t t) {
  SummedRoute r;
  if (t >= c.tokens || lane() >= c.p.layout.topk) return r;
  const int64_t f = t * c.p.layout.topk + lane();
  r.id = c.p.ids[f];
  r.row = c.p.route_row[f];
  if (!kPerRank && c.p.weights != nullptr) r.weight = c.p.weights[f];
  return r;
}

/// A lane's row of token t. The token's owner adds these rows in the order of the lanes.
struct AddedRow {
  bool exists = false;
  int rank = 0;       ///< the rank that returns the row; this rank if there is no row
  int64_t index = 0;  ///< in the inbox
  const std::byte* at = nullptr;
};
/// `r`: this lane's route of the token. Call from all lanes.
template <bool kPerRank>
__device__ __forceinline__ AddedRow added_row(const LayerCall& c, int64_t t, const SummedRoute& r) {
  const FusedParams& p = c.p;
  const CallContext& call = p.call;
  const bool is_kept = r.id >= 0 && r.row >= 0;
  const int owner = is_kept ? p.map.owner(r.id) : call.rank();
  if constexpr (!kPerRank) {
    if (!is_kept) return {false, owner, 0, nullptr};
    const int64_t f = t * p.layout.topk + lane();
    return {true, owner, f,
            owner == call.rank() ? p.memory.y + r.row * p.layout.row_bytes : call.heap.local(p.layout.inbox(f))};
  }
  const uint32_t low = __reduce_or_sync(~0u, is_kept && owner < 32 ? 1U << owner : 0U),
                 high = __reduce_or_sync(~0u, is_kept && owner >= 32 ? 1U << (owner - 32) : 0U);
  const uint64_t ranks = static_cast<uint64_t>(high) << 32 | low;
  if (lane() >= bits(ranks)) return {false, call.rank(), 0, nullptr};
  const int64_t index = t * p.layout.returned_rows() + lane();
  return {true, nth_bit(ranks, lane()), index, call.heap.local(p.layout.inbox(index))};
}

/// Computes part `part` of `parts` of token t's sum. `r`: this lane's route for the token. Returns false after a fault.
template <class A, bool kPerRank, int kVectors, int kAtOnce>
__device__ __forceinline__ bool sum_token(const LayerCall& c, int64_t t, int part, int parts, const SummedRoute& r) {
  const FusedParams& p = c.p;
  const int64_t row_bytes = p.layout.row_bytes;
  const int vectors = static_cast<int>(row_bytes / 16), each = (vectors + parts - 1) / parts;
  const AddedRow mine = added_row<kPerRank>(c, t, r);
  const uint64_t* const flag = p.call.heap.local(p.layout.returned(mine.index));
  if (!wait_until<A>(c, Site::layer_returned, Event::wait_returned, mine.rank,
                     [&] { return mine.exists ? ptx::load_acquire<Scope::system>(flag) : c.word; }))
    return false;
  __syncwarp();
  const RoleSpan<A> span(Event::sum_returned);
  const uint32_t kept = __ballot_sync(~0u, mine.exists);
  const int end = (part + 1) * each < vectors ? (part + 1) * each : vectors;
  for (int v = part * each + lane(); v - lane() < end; v += 32 * kVectors) {
    float sum[kVectors][8] = {};
    auto* const out = reinterpret_cast<uint4*>(p.out + t * row_bytes) + v;
    if (p.add) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u)
        if (v + 32 * u < end) widen(out[32 * u], sum[u]);
    }
    add_rows<kVectors, kAtOnce>(kept, mine.at, r.weight, !kPerRank && p.weights != nullptr, v, end, sum);
#pragma unroll
    for (int u = 0; u < kVectors; ++u)
      if (v + 32 * u < end) out[32 * u] = rounded(sum[u]);
  }
  span.end(__popc(kept));
  return true;
}

/// Sums each token's rows in float32, starting from +0 or from the row of `out`, with a single rounding, like combine.
/// per_route: weighted outputs, k ascending; per_rank: the ranks' sums, ranks ascending. Each lane keeps in flight kVectors
/// 16-byte vectors from each of kAtOnce rows, the routes of the next part, and the number of the part after that.
template <class A, bool kPerRank, int kVectors, int kAtOnce>
__device__ __forceinline__ void sum_tokens(const LayerCall& c) {
  constexpr int kParts = 2;
  const auto claim = [&] { return lane() == 0 ? ptx::add_relaxed(&c.p.memory.counters->sums, 1) : 0; };
  uint64_t claimed = claim();
  int64_t item = static_cast<int64_t>(__shfl_sync(~0u, claimed, 0));
  claimed = claim();
  SummedRoute route = summed_route<kPerRank>(c, item / kParts);
  while (item < c.tokens * kParts) {
    const auto next = static_cast<int64_t>(__shfl_sync(~0u, claimed, 0));
    claimed = claim();
    const SummedRoute following = summed_route<kPerRank>(c, next / kParts);
    if (!sum_token<A, kPerRank, kVectors, kAtOnce>(c, item / kParts, static_cast<int>(item % kParts), kParts, route)) return;
    item = next;
    route = following;
  }
}

}  // namespace switchyard::detail::fused

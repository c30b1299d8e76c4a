// SPDX-License-Identifier: Apache-2.0
// A block's view in the plan kernel: its share of the tokens, its shared memory and the gathered counts.
#pragma once

#include <algorithm>

#include "arch/cuda/cuda_arch.cuh"
#include "exchange/gpu/frame.cuh"
#include "exchange/normal/plan/launch.hpp"
#include "plan/decisions.hpp"

namespace switchyard::detail {

inline constexpr int kPlanWarps = 8;
inline constexpr int kPlanThreads = kPlanWarps * kLanes;

SWITCHYARD_FN inline int64_t tokens_per_warp(int64_t tokens, int64_t blocks) {
  return (tokens + blocks * kPlanWarps - 1) / (blocks * kPlanWarps);
}

/// Shared memory of a block. Arrays follow in the order of PlanView.
struct PlanBlock {
  CallContext call;
  int64_t tokens;
  int64_t first_token, tokens_per_warp;  ///< of the block; of each warp
  int64_t capacity[kMaxRanks];
  int64_t needed[kMaxRanks];  ///< rows that each rank needs
  int last_block;
  int failed;
  Participation participation;
  int overflow;  ///< first rank without room, or -1
};

/// Bytes of the arrays in a block's shared memory.
constexpr int64_t plan_array_bytes(Layout layout, int world, int experts, int64_t tokens_of_warp) {
  const int64_t gathered = std::max(world + experts, world * world);
  const int64_t ints =
      int64_t{layout == Layout::expert_major ? (kPlanWarps + 1) * experts : experts} + kPlanWarps * world + gathered;
  return kPlanWarps * tokens_of_warp * 8 + ints * 4;
}
constexpr int64_t max_array_bytes(Layout layout) {
  return plan_array_bytes(layout, kMaxRanks, max_cuda_experts(layout), kMaxTokensPerPlanBlock / kPlanWarps);
}
inline constexpr int64_t kMaxArrayBytes = 227 * 1024 - static_cast<int64_t>(sizeof(PlanBlock)) - 2048;  // of sm_90
static_assert(max_array_bytes(Layout::rank_major) <= kMaxArrayBytes && max_array_bytes(Layout::expert_major) <= kMaxArrayBytes);

struct PlanView {
  const PlanParams& p;
  PlanBlock& b;
  unsigned long long* masks;  ///< [tokens of the block] ranks of each token, as bits
  int32_t* hist;              ///< expert-major: [warps, E]; rank-major: [E]
  int32_t* start;             ///< expert-major: [E]
  int32_t* touching;          ///< [warps, W]
  int32_t* gathered;  ///< first the counts sent by this rank, [W + E]; then D: [W, W] tokens of source s with a route to rank d
  int lane, warp;

  __device__ int64_t begin() const { return least(b.first_token + warp * b.tokens_per_warp, b.tokens); }
  __device__ int64_t end() const {
    const int64_t block_end = least(b.first_token + kPlanWarps * b.tokens_per_warp, b.tokens);
    return least(b.first_token + (warp + 1) * b.tokens_per_warp, block_end);
  }
  /// The expert of route f, or -1. Increments `invalid` if the route's id is neither an expert nor -1.
  __device__ int32_t id(int64_t f, int& invalid) const {
    const int64_t raw = p.ids64 ? static_cast<const int64_t*>(p.ids)[f] : static_cast<const int32_t*>(p.ids)[f];
    const bool expert = raw >= 0 && raw < p.map.experts;
    invalid += !expert && raw != -1 ? 1 : 0;
    return expert ? static_cast<int32_t>(raw) : -1;
  }
  /// Counts of the invalid ids in this rank's calls; null in idle launches, and in passes, whose ids have been counted.
  __device__ InvalidIdCounts* invalid_ids() const {
    return p.pass > 0 ? nullptr : reinterpret_cast<InvalidIdCounts*>(b.call.invalid_ids);
  }
  __device__ const CountsHead* head(int rank) const { return b.call.heap.local(p.control.counts_head(b.call.epoch, rank)); }
  __device__ const int32_t* touching_of(int source) const { return reinterpret_cast<const int32_t*>(head(source) + 1); }
  __device__ const int32_t* routes_of(int source) const { return touching_of(source) + p.map.world; }
  __device__ bool expert_major() const { return p.layout == Layout::expert_major; }
  __device__ int columns() const { return p.map.world + p.map.experts; }
  /// Copies D to shared memory. Call from all threads, after the counts have arrived.
  __device__ void load_touching() const {
    const int world = p.map.world;
    for (int i = threadIdx.x; i < world * world; i += kPlanThreads) gathered[i] = touching_of(i / world)[i % world];
  }
};

/// Accounts for the call's invalid ids. Call from one thread of the last block, after all blocks have counted.
__device__ inline void take_invalid_ids(const PlanView& v) {
  InvalidIdCounts* const counts = v.invalid_ids();
  const uint64_t invalid = counts != nullptr ? __ldcg(&counts->of_call) : 0;
  v.p.tables.header->invalid_ids = static_cast<int64_t>(invalid);
  if (invalid == 0) return;
  counts->of_call = 0;
  add_invalid_ids(v.b.call, invalid);
}

/// True for a pass that is not part of the call (PlanParams::pass). Call first; waits for the kernel of the previous pass.
__device__ __forceinline__ bool pass_is_left_out(const PlanParams& p) {
  if (p.pass == 0) return false;
  ptx::wait_for_previous();
  return static_cast<uint64_t>(p.pass) > p.state->passes;
}
/// T, or the number of tokens of the pass.
__device__ __forceinline__ int64_t tokens_of(const PlanParams& p) {
  if (p.device_tokens == nullptr) return p.tokens;
  const int64_t left = *p.device_tokens - p.first_token;
  return least(left > 0 ? left : 0, p.tokens);
}
/// Number of passes that cover the tokens of all ranks; identical on all ranks.
__device__ inline uint64_t count_passes(const PlanView& v) {
  int64_t max = 0;
  for (int s = 0; s < v.p.map.world; ++s) max = v.head(s)->tokens > max ? v.head(s)->tokens : max;
  return static_cast<uint64_t>((max + v.p.split_tokens - 1) / v.p.split_tokens);
}

/// Copies the gathered counts to the tables. Call from all threads of a block.
__device__ inline void keep_counts(const PlanView& v) {
  const int64_t row = v.p.control.counts_row_bytes();
  const auto* from = reinterpret_cast<const uint4*>(v.head(0));
  auto* to = reinterpret_cast<uint4*>(v.p.tables.counts);
  for (int64_t i = threadIdx.x; i < row * v.p.map.world / 16; i += kPlanThreads) to[i] = from[i];
}

/// Calls f(route, id, lanes with the same id) in all lanes, for 32 consecutive routes of this warp at a time. `id_of(route)` is
/// called only for existing routes; a lane without a route gets a unique id below -1.
template <class Id, class F>
__device__ void for_routes(const PlanView& v, Id&& id_of, F&& f) {
  const int64_t end = v.end() * v.p.topk;
#pragma unroll 1  // small code: a kernel's first pass through it runs at the speed of instruction fetch
  for (int64_t base = v.begin() * v.p.topk; base < end; base += kLanes) {
    const int64_t r = base + v.lane;
    const int32_t id = r < end ? id_of(r) : -2 - v.lane;
    f(r, id, __match_any_sync(kAllLanes, id));
    __syncwarp();
  }
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// What every kernel of low-latency mode does before its protocol begins, and the shape of its launch.
#pragma once

#include <type_traits>

#include "arch/cuda/cuda_traced.cuh"
#include "exchange/cuda/kernel_frame.cuh"
#include "exchange/cuda/low_latency_launch.hpp"

namespace switchyard::detail {

/// What publish_entry needs, while other warps ask for what the call begins with.
__device__ inline void fence_entry(const CudaWarp& w) {
  if (is_announcer(w)) ptx::fence_acq_rel<Scope::system>();
}

/// T of this launch.
__device__ inline int64_t tokens_now(int64_t bound, const int32_t* device_tokens) {
  if (device_tokens == nullptr) return bound;
  const int64_t tokens = *device_tokens;
  return tokens < 0 ? 0 : tokens < bound ? tokens : bound;
}

/// All threads: copies the host's parameters to a block's shared memory. P may have a layout and a place of scales of its own.
template <class Given, class P>
__device__ void share_params(const Given& given, P& p) {
  copy_to_shared(given, static_cast<Given&>(p));
  if constexpr (!std::is_same_v<P, Given>) {
    copy_to_shared(given.layout, static_cast<LowLatencyLayout&>(p.layout));
    if constexpr (requires { p.scale_place; }) copy_to_shared(given.scale_place, static_cast<ScalePlace&>(p.scale_place));
  }
}

/// The first ids of a block's copy, in its threads: two each.
struct EarlyIds {
  static constexpr int kEach = 2;
  int32_t id[kEach];
};
/// This thread's ids from `first` on, of `count`; -1 behind them.
__device__ inline EarlyIds load_ids(const IdReader& given, int64_t first, int64_t count) {
  EarlyIds ids;
#pragma unroll
  for (int a = 0; a < EarlyIds::kEach; ++a) {
    const int64_t i = first + a * blockDim.x;
    ids.id[a] = i < count ? given(i) : -1;
  }
  return ids;
}

/// Those of the ids that no lane before this one, of the same token, has. Lanes hold consecutive routes; `topk` is a power of
/// two, at most 32.
__device__ inline EarlyIds firsts_of_lanes(const EarlyIds& ids, int topk) {
  const int k = static_cast<int>(threadIdx.x) % topk;
  EarlyIds firsts = ids;
#pragma unroll 1
  for (int d = 1; d < topk; ++d) {
#pragma unroll
    for (int a = 0; a < EarlyIds::kEach; ++a) {
      const int32_t before = __shfl_up_sync(kAllLanes, ids.id[a], static_cast<unsigned>(d), topk);
      if (d <= k && before == ids.id[a]) firsts.id[a] = -1;
    }
  }
  return firsts;
}

/// All threads of a block, before a barrier: a copy of the ids of `tokens` tokens in the block's shared memory; counting reads
/// them many times, and memory is a microsecond away. `ids` (in shared memory) then reads the copy. `early`: load_ids of at
/// least as many. `counts`: they will be counted.
template <class Ids>
__device__ void stage_ids(const IdReader& given, EarlyIds early, int64_t tokens, int topk, bool counts, std::byte* shared,
                          const CudaShape& shape, Ids& ids) {
  const int64_t count = tokens * topk;
  if (count * 8 > shape.block_bytes) return;
  auto* const copy = reinterpret_cast<int32_t*>(shared + shape.block_at());
  const bool by_lanes = kLanes % topk == 0;
#pragma unroll 1  // code from memory is slower than the loop
  for (int64_t base = threadIdx.x; base - threadIdx.x < count; base += EarlyIds::kEach * blockDim.x) {
    EarlyIds firsts{};
    if (counts && by_lanes) firsts = firsts_of_lanes(early, topk);
#pragma unroll
    for (int a = 0; a < EarlyIds::kEach; ++a) {
      const int64_t i = base + a * blockDim.x;
      if (i >= count) continue;
      copy[i] = early.id[a];
      if (counts) copy[count + i] = by_lanes ? firsts.id[a] : given.is_first_of_token(i, topk) ? early.id[a] : -1;
    }
    early = load_ids(given, base + EarlyIds::kEach * blockDim.x, count);
  }
  if (threadIdx.x != 0) return;
  if constexpr (std::is_same_v<Ids, StagedIds>)
    ids = {copy, copy + count};
  else
    ids = {copy, false, given.experts, counts ? copy + count : nullptr};
}

/// Each warp: the rows that it will send first are on their way while the call begins.
__device__ inline void prefetch_first_part(const CudaWarp& w, const LowLatencyDispatchParams& p, int64_t tokens) {
  const Sender me(w, p.parts);
  const int64_t t = p.layout.token_of(w.block() + int64_t{me.team} * w.num_blocks());
  if (!me.sends() || t >= tokens) return;
  const auto element = static_cast<int64_t>(dtype_bytes(p.src_type));
  const std::byte* row = p.x + t * p.src_row_bytes;
  const ColumnRange range = column_range(p, me.part, p.part_columns);
  const int64_t end = (range.column + range.columns) * element;
  if (p.weights != nullptr && threadIdx.x % kLanes == 0) ptx::prefetch(p.weights + t * p.layout.topk);
  SWITCHYARD_ROLLED
  for (int64_t b = range.column * element + threadIdx.x % kLanes * 128; b < end; b += kLanes * 128) ptx::prefetch(row + b);
}

/// Each block's first warp, and each warp for itself: what a combine reads first is on its way. What a warp returns is known
/// beforehand if all ranks sent all tokens that they may; if not, nothing is lost.
__device__ inline void prefetch_first_return(const CudaWarp& w, const LowLatencyCombineParams& c) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  if (w.warp() == 0 && lane == 0) {
    ptx::prefetch(c.source_tokens);
    ptx::prefetch(c.own_tokens);
    ptx::prefetch(c.rows_of_expert);
  }
  if (c.order != CombineOrder::per_rank || lane != 0) return;
  const ItemPiece at = split_index(spread_index(w), c.layout);
  if (at.item < c.layout.rows_per_expert()) ptx::prefetch(c.routes + at.item * c.layout.topk);
}

inline constexpr int64_t kStaticShared = 3072;      ///< parameters
inline constexpr uint32_t kScratch = kMaxTopk * 8;  ///< of a warp: rows or flags of a message's entries

/// With room for the ids of `routes` routes, if there is.
inline CudaShape low_latency_shape(int64_t routes, const DeviceLimits& limits) {
  CudaShape shape{kLowLatencyWarps, 0, 0, kScratch};
  const int64_t ids = round_up((routes > 0 ? routes : 1) * 8, 16);
  if (shape.shared_bytes() + ids + kStaticShared <= limits.shared_bytes) shape.block_bytes = static_cast<uint32_t>(ids);
  return shape;
}

}  // namespace switchyard::detail

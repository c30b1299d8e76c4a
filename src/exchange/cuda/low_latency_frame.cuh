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

/// The first ids of a block's copy, as they lie in memory, in its threads: two each, asked for long before they are used.
struct EarlyIds {
  static constexpr int kEach = 2;
  int64_t raw[kEach];
};
/// This thread's ids from `first` on, of `count`; -1 behind them. All are under way before one is looked at.
__device__ inline EarlyIds load_ids(const IdReader& given, int64_t first, int64_t count) {
  EarlyIds ids{{-1, -1}};
  const int64_t step = blockDim.x;
  if (given.is_int64) {
#pragma unroll
    for (int a = 0; a < EarlyIds::kEach; ++a)
      if (first + a * step < count) ids.raw[a] = static_cast<const int64_t*>(given.ids)[first + a * step];
  } else {
    int32_t narrow[EarlyIds::kEach] = {-1, -1};
#pragma unroll
    for (int a = 0; a < EarlyIds::kEach; ++a)
      if (first + a * step < count) narrow[a] = static_cast<const int32_t*>(given.ids)[first + a * step];
#pragma unroll
    for (int a = 0; a < EarlyIds::kEach; ++a) ids.raw[a] = narrow[a];
  }
  return ids;
}

/// All threads of a block, before a barrier: a copy of the ids of `count` routes in the block's shared memory, from
/// shape.block_at() on; counting reads them many times, and memory is a microsecond away. `early`: load_ids of at least as
/// many. False: there is no room.
__device__ inline bool stage_ids(const IdReader& given, EarlyIds early, int64_t count, std::byte* shared,
                                 const CudaShape& shape) {
  if (shape.block_bytes == 0) return false;
  auto* const copy = reinterpret_cast<int32_t*>(shared + shape.block_at());
#pragma unroll 1  // code from memory is slower than the loop
  for (int64_t base = threadIdx.x; base - threadIdx.x < count; base += EarlyIds::kEach * blockDim.x) {
#pragma unroll
    for (int a = 0; a < EarlyIds::kEach; ++a)
      if (base + a * blockDim.x < count) copy[base + a * blockDim.x] = given.expert_of(early.raw[a]);
    early = load_ids(given, base + EarlyIds::kEach * blockDim.x, count);
  }
  return true;
}

/// The same of what a call sends, with the T of this launch; p.ids then reads the copy.
template <class P>
__device__ void stage_sending(const LowLatencyDispatchParams& given, const EarlyIds& early, int64_t tokens, std::byte* shared,
                              const CudaShape& shape, P& p) {
  const bool staged = stage_ids(given.ids, early, tokens * given.layout.topk, shared, shape);
  if (threadIdx.x != 0) return;
  p.tokens = tokens;
  if (!staged) return;
  const auto* copy = reinterpret_cast<const int32_t*>(shared + shape.block_at());
  if constexpr (std::is_same_v<decltype(p.ids), StagedIds>)
    p.ids = {copy};
  else
    p.ids = {copy, false, given.ids.experts};
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
  const int64_t ids = round_up((routes > 0 ? routes : 1) * 4, 16);
  if (shape.shared_bytes() + ids + kStaticShared <= limits.shared_bytes) shape.block_bytes = static_cast<uint32_t>(ids);
  return shape;
}

}  // namespace switchyard::detail

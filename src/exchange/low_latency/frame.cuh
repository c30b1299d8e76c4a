// SPDX-License-Identifier: Apache-2.0
// Prologue of every low-latency kernel, before its protocol, and the launch shape.
#pragma once

#include <type_traits>

#include "arch/cuda/cuda_traced.cuh"
#include "exchange/gpu/frame.cuh"
#include "exchange/low_latency/flat_launch.hpp"
#include "protocol/low_latency/dispatch.hpp"

namespace switchyard::detail {

/// Ids and token sets in the block's shared memory.
struct SharedIds {
  uint32_t ids = 0;

  SWITCHYARD_FN int32_t operator()(int f) const {
    return static_cast<int32_t>(ptx::load_shared(ids + static_cast<uint32_t>(f) * 4));
  }
};
struct SharedSets : TokenSets {
  static constexpr SWITCHYARD_FN bool ready() { return true; }
  SWITCHYARD_FN int count(int32_t expert, int tokens) const {
    const uint32_t set = ptx::shared_address(sets) + static_cast<uint32_t>(expert * words) * 4;
    return count_in([set](int i) { return ptx::load_shared(set + static_cast<uint32_t>(i) * 4); }, tokens);
  }
};

/// Executes the fence required by publish_entry; it overlaps with the loads of other warps at the beginning of the call.
__device__ inline void fence_entry(const CudaWarp& w) {
  if (is_announcer(w)) ptx::fence_acq_rel<Scope::system>();
}

/// The version of a call's map; 0 if `version` is null.
__device__ inline uint32_t version_now(const uint32_t* version) { return version != nullptr ? *version : 0; }

/// Copies the host's parameters to a block's shared memory. Call from all threads. The layout and the scale placement of P may
/// differ from those of Args.
template <class Args, class P>
__device__ void share_params(const Args& args, P& p) {
  copy_to_shared(args, static_cast<Args&>(p));
  if constexpr (!std::is_same_v<P, Args>) {
    copy_to_shared(args.layout, static_cast<LowLatencyLayout&>(p.layout));
    if constexpr (requires { p.scale_place; }) copy_to_shared(args.scale_place, static_cast<ScalePlace&>(p.scale_place));
  }
}

/// The first ids of a block's copy, unconverted, held in registers (two per thread) and loaded long before they are used.
struct EarlyIds {
  static constexpr int kEach = 2;
  int64_t raw[kEach];
};
/// Loads this thread's ids, starting at `first`, out of `count`; ids past the end are -1. All loads are in flight before the
/// first is used.
__device__ inline EarlyIds load_ids(const IdReader& args, int first, int count) {
  EarlyIds ids{{-1, -1}};
  const auto step = static_cast<int>(blockDim.x);
  if (args.is_int64) {
#pragma unroll
    for (int a = 0; a < EarlyIds::kEach; ++a)
      if (first + a * step < count) ids.raw[a] = static_cast<const int64_t*>(args.ids)[first + a * step];
  } else {
    int32_t narrow[EarlyIds::kEach] = {-1, -1};
#pragma unroll
    for (int a = 0; a < EarlyIds::kEach; ++a)
      if (first + a * step < count) narrow[a] = static_cast<const int32_t*>(args.ids)[first + a * step];
#pragma unroll
    for (int a = 0; a < EarlyIds::kEach; ++a) ids.raw[a] = narrow[a];
  }
  return ids;
}

/// Bytes in a block's shared memory for the ids of `routes` routes, and for the sets of `tokens` tokens that follow them.
SWITCHYARD_FN inline int staged_id_bytes(int routes) { return ((routes > 0 ? routes : 1) * 4 + 15) / 16 * 16; }
SWITCHYARD_FN inline int64_t staged_set_bytes(int tokens, int experts) {
  return int64_t{experts} * TokenSets::words_for(tokens) * 4;
}

/// For calls whose ids are used as they are. slot_lookup.cuh has the other lookup.
struct NoLookup {};

/// Writes each thread's ids, replaced with lookup(id, route) unless Lookup is NoLookup, to the block's copy, because they are
/// read many times and memory latency is a microsecond. Calls f(id, route) for each of them. Call from all threads of a block,
/// before a barrier. `early`: the result of load_ids for at least as many ids. \returns the number of the thread's ids that are
/// invalid
template <class F, class Lookup = NoLookup>
__device__ int stage_ids(const IdReader& args, EarlyIds early, int count, int32_t* copy, F&& f, const Lookup& lookup = {}) {
  const auto step = static_cast<int>(blockDim.x);
  int invalid = 0;
#pragma unroll 1  // code from memory is slower than the loop
  for (int route = static_cast<int>(threadIdx.x); route < count;) {
#pragma unroll
    for (int a = 0; a < EarlyIds::kEach; ++a, route += step) {
      if (route >= count) continue;
      if constexpr (!std::is_same_v<Lookup, NoLookup>) early.raw[a] = lookup(early.raw[a], route);
      const int32_t id = args.expert_of(early.raw[a]);
      copy[route] = id;
      invalid += args.is_invalid(early.raw[a]) ? 1 : 0;
      f(id, route);
    }
    if (route < count) early = load_ids(args, route, count);
  }
  return invalid;
}

/// Clears the token sets. Call from all threads of a block before stage_sending(), with a barrier in between.
__device__ inline void clear_sets(const LowLatencyDispatchParams& args, std::byte* shared, const CudaShape& shape) {
  if (shape.block_bytes == 0 || !args.with_places) return;
  const int at = staged_id_bytes(args.tokens * args.layout.topk);
  auto* const sets = reinterpret_cast<uint32_t*>(shared + shape.block_at() + at);
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < (shape.block_bytes - static_cast<unsigned>(at)) / 4; i += blockDim.x) sets[i] = 0;
}

/// If there is room, stages in the block's shared memory, starting at shape.block_at(), the ids that a call sends and the set
/// of tokens that choose each expert, for this launch's T. From then on, `p` reads the staged copies. Call from all threads of
/// a block, before a barrier. \pre if Lookup is not NoLookup, there is room
template <class P, class Lookup = NoLookup>
__device__ void stage_sending(const LowLatencyDispatchParams& args, const EarlyIds& early, int tokens, std::byte* shared,
                              const CudaShape& shape, P& p, const Lookup& lookup = {}) {
  const bool staged = shape.block_bytes > 0;
  auto* const copy = reinterpret_cast<int32_t*>(shared + shape.block_at());
  auto* const sets = reinterpret_cast<uint32_t*>(shared + shape.block_at() + staged_id_bytes(args.tokens * args.layout.topk));
  const int words = TokenSets::words_for(args.tokens);
  int invalid = 0;
  if (staged) {
    const uint32_t sets_at = ptx::shared_address(sets);
    const auto add_to_set = [&](int32_t id, int route) {
      if (!p.with_places || id < 0) return;
      const uint32_t t = args.layout.by_topk.quotient(static_cast<uint32_t>(route));
      ptx::or_shared(sets_at + (static_cast<uint32_t>(id * words) + t / 32) * 4, 1u << t % 32);
    };
    invalid = stage_ids(args.ids, early, tokens * args.layout.topk, copy, add_to_set, lookup);
  } else if (blockIdx.x == 0) {  // no other code reads each id exactly once
#pragma unroll 1
    for (auto f = static_cast<int>(threadIdx.x); f < tokens * args.layout.topk; f += static_cast<int>(blockDim.x))
      invalid += args.ids.is_invalid(args.ids.raw(f)) ? 1 : 0;
  }
  // All blocks stage all ids; only one counts the invalid ones.
  if (blockIdx.x == 0 && invalid != 0) add_invalid_ids(args.call, static_cast<uint64_t>(invalid));
  if (threadIdx.x != 0) return;
  p.tokens = tokens;
  if (!staged) return;
  if constexpr (std::is_same_v<decltype(p.ids), SharedIds>)
    p.ids = {ptx::shared_address(copy)};
  else
    p.ids = {copy, false, args.ids.experts};
  static_cast<TokenSets&>(p.sets) = {sets, words};
}

/// Prefetches, at the beginning of the call, the rows that each warp sends first.
__device__ inline void prefetch_first_part(const CudaWarp& w, const LowLatencyDispatchParams& p, int tokens) {
  const Sender me(w, p);
  const int t = p.layout.token_of(w.block() + me.team * w.num_blocks());
  if (me.team >= p.teams || t >= tokens) return;
  constexpr int kLine = 128;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, bytes = static_cast<int>(dtype_bytes(p.src_type, p.part_columns));
  const int begin = me.part * bytes, end = min(begin + bytes, p.src_row_bytes);
  const std::byte* row = p.x + int64_t{t} * p.src_row_bytes;
  if (p.weights != nullptr && lane == 0) ptx::prefetch(p.weights + t * p.layout.topk);
  SWITCHYARD_ROLLED
  for (int b = begin + lane * kLine; b < end; b += kLanes * kLine) ptx::prefetch(row + b);
}

/// Prefetches the data that a combine reads first: each block's first warp prefetches the shared words, and each warp its own
/// routes. The rows that a warp returns are known in advance if all ranks sent the maximum number of tokens; otherwise the
/// prefetch is harmless.
__device__ inline void prefetch_first_return(const CudaWarp& w, const LowLatencyCombineParams& c) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  if (w.warp() == 0 && lane == 0) {
    ptx::prefetch(c.source_tokens);
    ptx::prefetch(c.own);
    ptx::prefetch(c.rows_of_expert);
  }
  if (c.order != CombineOrder::per_rank || lane != 0) return;
  const ItemPiece at = split_index(spread_index(w), c.layout);
  if (at.item < c.layout.rows_per_expert()) ptx::prefetch(c.routes + at.item * c.layout.topk);
}

/// Returns the number of the dispatch whose outputs a combine sums. One thread of each block loads it early, together with
/// load_call_words().
__device__ inline uint64_t load_combined(const LowLatencyCombineParams& args) {
  const bool known = threadIdx.x == 0 && args.own != nullptr;  // null in warm-up launches
  return known ? ptx::load_relaxed<Scope::device>(&args.own->call) : 0;
}

inline constexpr int64_t kStaticShared = 3328;  ///< parameters, plus what tracing adds
inline int max_low_latency_shared(const DeviceLimits& limits) { return static_cast<int>(limits.shared_bytes - kStaticShared); }

inline constexpr uint32_t kScratch = kMaxTopk * 8;  ///< per warp: rows of a message's entries

/// Returns a shape with space for the ids of `tokens` tokens, for their sets unless `experts` is 0, and, at the end, for
/// `last_bytes` bytes; without this space if it does not all fit.
inline CudaShape low_latency_shape(int warps, int tokens, int topk, int experts, const DeviceLimits& limits,
                                   int64_t last_bytes = 0) {
  CudaShape shape{warps, 0, 0, kScratch};
  const int64_t bytes = round_up(staged_id_bytes(tokens * topk) + staged_set_bytes(tokens, experts) + last_bytes, 16);
  if (shape.shared_bytes() + bytes + kStaticShared <= limits.shared_bytes) shape.block_bytes = static_cast<uint32_t>(bytes);
  return shape;
}

}  // namespace switchyard::detail

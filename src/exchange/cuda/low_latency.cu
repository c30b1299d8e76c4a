// SPDX-License-Identifier: Apache-2.0
// Low-latency mode as kernels: protocol/low_latency_*.hpp over blocks of one multiprocessor each.
//
// Progress: all warps of a rank send before they wait, and wait for remote sends only. All blocks of a launch that receives
// must be able to run at the same time, because a block that has not begun has not sent: the launcher keeps the grid to one
// block per multiprocessor. Other kernels may delay a block, as long as they end.
#include "arch/cuda/cuda_traced.cuh"
#include "exchange/cuda/kernel_frame.cuh"
#include "exchange/cuda/low_latency_launch.hpp"

namespace switchyard::detail {

namespace {

/// T of this launch.
__device__ int64_t tokens_now(int64_t bound, const int32_t* device_tokens) {
  if (device_tokens == nullptr) return bound;
  const int64_t tokens = *device_tokens;
  return tokens < 0 ? 0 : tokens < bound ? tokens : bound;
}

/// True if no lane before this one, of the same token, has the same id. Lanes hold consecutive routes, of whole tokens.
__device__ bool first_in_token(int32_t id, int topk) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const unsigned same = __match_any_sync(kAllLanes, id);
  const unsigned before = (1u << lane) - 1u, tokens_before = (1u << (lane - lane % topk)) - 1u;
  return (same & before & ~tokens_before) == 0;
}

/// All threads of a block, before a barrier: a copy of the ids of `tokens` tokens in the block's shared memory, in one round of
/// loads; counting reads them many times, and memory is a microsecond away. `ids` (in shared memory) then reads the copy.
/// `counts`: they will be counted.
__device__ void stage_ids(const IdReader& given, int64_t tokens, int topk, bool counts, std::byte* shared,
                          const CudaShape& shape, IdReader& ids) {
  const int64_t count = tokens * topk;
  if (count * 8 > shape.block_bytes) return;
  auto* const copy = reinterpret_cast<int32_t*>(shared + shape.block_at());
  const bool by_lanes = kLanes % topk == 0;
  constexpr int kAhead = 2;
#pragma unroll 1  // code from memory is slower than the loop
  for (int64_t base = threadIdx.x; base - threadIdx.x < count; base += kAhead * blockDim.x) {
    int32_t id[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) id[a] = base + a * blockDim.x < count ? given(base + a * blockDim.x) : -1;
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t i = base + a * blockDim.x;
      const bool used = i < count;
      if (used) copy[i] = id[a];
      if (!counts) continue;
      const bool first = by_lanes ? first_in_token(id[a], topk) : used && given.is_first_of_token(i, topk);
      if (used) copy[count + i] = first ? id[a] : -1;
    }
  }
  if (threadIdx.x == 0) ids = {copy, false, given.experts, counts ? copy + count : nullptr};
}

/// Each warp: the rows that it will send first are on their way while the call begins.
__device__ void prefetch_first_piece(const CudaWarp& w, const LowLatencyDispatchParams& p, int64_t tokens) {
  const ItemPiece at = split_index(spread_index(w), p.layout.pieces);
  const int64_t t = p.layout.token_of(at.item);
  if (t >= tokens) return;
  const auto element = static_cast<int64_t>(dtype_bytes(p.src_type));
  const std::byte* row = p.x + t * p.src_row_bytes;
  const int64_t end = p.layout.column(at.piece + 1) * element;
  for (int64_t b = p.layout.column(at.piece) * element + threadIdx.x % kLanes * 128; b < end; b += kLanes * 128)
    ptx::prefetch(row + b);
}

template <class A>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    low_latency_dispatch_kernel(const __grid_constant__ CudaLowLatencyDispatch given, const __grid_constant__ CudaShape shape,
                                const LaunchedHalves halves) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(LowLatencyDispatchParams)];
  auto& p = *reinterpret_cast<LowLatencyDispatchParams*>(params);
  launch_dependents();
  copy_to_shared(given.d, p);
  __syncthreads();
  wait_for_previous();
  CudaWarp w(dynamic_shared, shape);
  const int64_t tokens = tokens_now(given.d.tokens, given.device_tokens);
  if (halves.send) prefetch_first_piece(w, given.d, tokens);
  if (halves.send) stage_ids(given.d.ids, tokens, given.d.layout.topk, true, dynamic_shared, shape, p.ids);
  if (threadIdx.x == 0) p.tokens = tokens;
  if (!begin_block(given.d.call, given.state, halves.receive, p.call)) return;
  const KernelTrace<A> trace(w, p.call.device_trace);
  if (halves.send) low_latency_send<A>(w, p);
  if (halves.receive) (void)low_latency_receive<A>(w, p);
  A::settle(w);
}

template <class A>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    low_latency_combine_kernel(const __grid_constant__ CudaLowLatencyCombine given, const __grid_constant__ CudaShape shape,
                               const LaunchedHalves halves) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(LowLatencyCombineParams)];
  auto& p = *reinterpret_cast<LowLatencyCombineParams*>(params);
  launch_dependents();
  copy_to_shared(given.c, p);
  __syncthreads();
  wait_for_previous();
  CudaWarp w(dynamic_shared, shape);
  const IdReader own{given.c.own_ids, false, given.c.layout.map.experts};
  IdReader staged = own;
  if (halves.receive) stage_ids(own, given.c.layout.max_tokens, given.c.layout.topk, false, dynamic_shared, shape, staged);
  if (threadIdx.x == 0) p.own_ids = static_cast<const int32_t*>(staged.ids);
  if (!begin_block(given.c.call, given.state, halves.receive, p.call)) return;
  const KernelTrace<A> trace(w, p.call.device_trace);
  if (halves.send) low_latency_return<A>(w, p);
  if (halves.receive) (void)low_latency_sum<A>(w, p);
  A::settle(w);
}

template <class A>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    flat_kernel(const __grid_constant__ CudaFlat given, const __grid_constant__ CudaShape shape, const LaunchedHalves) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(FlatParams)];
  auto& p = *reinterpret_cast<FlatParams*>(params);
  launch_dependents();
  copy_to_shared(given.f, p);
  __syncthreads();
  wait_for_previous();
  CudaWarp w(dynamic_shared, shape);
  const int64_t tokens = tokens_now(given.f.d.tokens, given.device_tokens);
  prefetch_first_piece(w, given.f.d, tokens);
  stage_ids(given.f.d.ids, tokens, given.f.d.layout.topk, true, dynamic_shared, shape, p.d.ids);
  if (threadIdx.x == 0) p.d.tokens = tokens;
  if (!begin_block(given.f.d.call, given.state, true, p.d.call)) return;
  if (threadIdx.x == 0) p.c.call.epoch = p.d.call.epoch;
  __syncthreads();
  const KernelTrace<A> trace(w, p.d.call.device_trace);
  (void)flat_exchange<A>(w, p);
  A::settle(w);
}

constexpr int64_t kStaticShared = 3072;  ///< parameters
static_assert(sizeof(FlatParams) <= kStaticShared && sizeof(CudaFlat) <= 4096);

/// With room for the ids of `routes` routes, if there is.
CudaShape shape_of(int64_t scratch_bytes, int64_t routes, const DeviceLimits& limits) {
  CudaShape shape{kLowLatencyWarps, 0, 0, static_cast<uint32_t>(round_up(scratch_bytes, 16))};
  const int64_t ids = round_up(routes * 8, 16);
  if (shape.shared_bytes() + ids + kStaticShared <= limits.shared_bytes) shape.block_bytes = static_cast<uint32_t>(ids);
  return shape;
}

}  // namespace

int64_t low_latency_scratch_limit(const DeviceLimits& limits) {
  const auto room = static_cast<int64_t>(limits.shared_bytes) - kStaticShared - shape_of(0, 0, limits).shared_bytes();
  return room / kLowLatencyWarps / 16 * 16;
}

void prepare_low_latency_kernels(const DeviceLimits& limits) {
  const int most = static_cast<int>(limits.shared_bytes - kStaticShared);
  allow_shared(low_latency_dispatch_kernel<CudaLanes>, most);
  allow_shared(low_latency_dispatch_kernel<CudaLanesTraced>, most);
  allow_shared(low_latency_combine_kernel<CudaLanes>, most);
  allow_shared(low_latency_combine_kernel<CudaLanesTraced>, most);
  allow_shared(flat_kernel<CudaLanes>, most);
  allow_shared(flat_kernel<CudaLanesTraced>, most);
}

void warm_up_low_latency_kernels(const CallContext& call, const DeviceLimits& limits, LowLatencyState* state,
                                 cudaStream_t stream) {
  CudaLowLatencyDispatch d;
  d.d.call = call;
  d.state = state;
  launch_low_latency(d, {true, false}, 0, limits.multiprocessors, limits, stream);
  CudaLowLatencyCombine c;
  c.c.call = call;
  c.state = state;
  launch_low_latency(c, {true, false}, 0, limits.multiprocessors, limits, stream);
  CudaFlat f;
  f.f.d.call = call;
  f.state = state;
  launch_low_latency(f, {true, true}, 0, limits.multiprocessors, limits, stream);
}

// Every launch may begin while the kernel before it on the stream ends: it waits before it reads anything.
void launch_low_latency(const CudaLowLatencyDispatch& p, LaunchedHalves halves, int64_t scratch_bytes, int blocks,
                        const DeviceLimits& limits, cudaStream_t stream) {
  const CudaShape shape = shape_of(scratch_bytes, p.d.tokens * p.d.layout.topk, limits);
  const bool traced = p.d.call.device_trace.records != nullptr;
  launch_kernel(traced ? low_latency_dispatch_kernel<CudaLanesTraced> : low_latency_dispatch_kernel<CudaLanes>, blocks, shape,
                limits.dependent_launches, stream, "low-latency dispatch kernel", p, shape, halves);
}
void launch_low_latency(const CudaLowLatencyCombine& p, LaunchedHalves halves, int64_t scratch_bytes, int blocks,
                        const DeviceLimits& limits, cudaStream_t stream) {
  const CudaShape shape = shape_of(scratch_bytes, p.c.layout.max_tokens * p.c.layout.topk, limits);
  const bool traced = p.c.call.device_trace.records != nullptr;
  launch_kernel(traced ? low_latency_combine_kernel<CudaLanesTraced> : low_latency_combine_kernel<CudaLanes>, blocks, shape,
                limits.dependent_launches, stream, "low-latency combine kernel", p, shape, halves);
}
void launch_low_latency(const CudaFlat& p, LaunchedHalves halves, int64_t scratch_bytes, int blocks, const DeviceLimits& limits,
                        cudaStream_t stream) {
  const CudaShape shape = shape_of(scratch_bytes, p.f.d.tokens * p.f.d.layout.topk, limits);
  const bool traced = p.f.d.call.device_trace.records != nullptr;
  launch_kernel(traced ? flat_kernel<CudaLanesTraced> : flat_kernel<CudaLanes>, blocks, shape, limits.dependent_launches,
                stream, "all-to-all kernel", p, shape, halves);
}

}  // namespace switchyard::detail

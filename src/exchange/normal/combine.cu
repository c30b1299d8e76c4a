// SPDX-License-Identifier: Apache-2.0
// The combine kernels: protocol/normal/combine_pull.hpp, combine_copies.hpp, combine_sums.hpp, combine_routes.hpp or
// combine_ring.hpp with one block per multiprocessor.
//
// Progress: a warp waits for `outputs` from all ranks, including its own; the last warp of a rank to arrive publishes it. The
// same holds for `pulled`. With rings, a warp may wait for any warp of any rank. All blocks must therefore be able to run
// concurrently, so the launcher limits the grid to one block per multiprocessor. Other kernels may delay a block as long as
// they end.
#include "arch/cuda/cuda_traced.cuh"
#include "base/mix_hash.hpp"
#include "exchange/normal/frame.cuh"
#include "exchange/normal/hosts/complete.cuh"
#include "protocol/normal/combine_ring.hpp"
#include "protocol/normal/combine_routes.hpp"

namespace switchyard::detail {

namespace {

/// The last step of the call. Call from one warp.
__device__ void end_combine(const CudaCombineParams& args, const CallContext& call, Participation participation, bool moved) {
  int failed_rank = -1;
  if (moved)
    end_call(args.state, call.epoch, participation);
  else
    (void)end_unmoved(call, args.words, args.c.shape.control, args.state, participation, args.soft, failed_rank);
}

/// Each body of combine with direct staging has a separate kernel because a common kernel could keep less in registers.
enum class Body { pull, copies, sums, routes };

Body body_of(const CombineParams& c) {
  if (c.shape.layout == Layout::rank_major) return c.staging.place.pull.ready == 0 ? Body::copies : Body::pull;
  return c.shape.order == CombineOrder::per_route ? Body::routes : Body::sums;
}

/// \returns false after a (recorded) fault
template <class A, Body kBody>
__device__ bool run(CudaWarp& w, const CombineParams& c) {
  if constexpr (kBody == Body::pull) return combine_pull<A>(w, c);
  if constexpr (kBody == Body::copies) return combine_copies<A>(w, c);
  if constexpr (kBody == Body::sums) return combine_sums<A>(w, c);
  if constexpr (kBody == Body::routes) return combine_routes<A>(w, c);
}

}  // namespace

namespace normal {

template <class A, Body kBody>
__global__ void __launch_bounds__(kSumWarps* kLanes, 1)
    combine_kernel(const __grid_constant__ CudaCombineParams args, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CombineParams)];
  __shared__ Participation participation;
  __shared__ uint64_t of_block[kSumChunks + 1];
  auto& c = *reinterpret_cast<CombineParams*>(params);
  copy_to_shared(args.c, c);
  if (!begin_block(args.c.call, args.words, args.state, c.call, participation, args.header)) return;
  CudaWarp w(dynamic_shared, shape);
  const TablesHeader& header = *args.header;
  if (!takes_part(participation)) return do_nothing(c.call, participation, header, args.state, args.soft);
  const KernelTrace<A> trace(w, c.call.device_trace, Event::combine, pack_launch(c.call.epoch, args.state, header.tokens));
  if (threadIdx.x == 0) {
    complete(c, args, header);
    c.work.of_block.first = of_block;
  }
  if (threadIdx.x <= kSumChunks) of_block[threadIdx.x] = 0;
  __syncthreads();
  if (!run<A, kBody>(w, c)) return Cuda::settle(w);
  const bool moved = placements_agree(w, c.call, c.shape.control, c.staging.place.signature);
  Cuda::settle(w);
  if (w.index() == 0) end_combine(args, c.call, participation, moved);
}

template <class A>
__global__ void __launch_bounds__(kMoveWarps* kLanes, 1)
    ring_combine_kernel(const __grid_constant__ CudaCombineParams args, const __grid_constant__ RingParts ring,
                        const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(RingCombineParams)];
  __shared__ Participation participation;
  auto& p = *reinterpret_cast<RingCombineParams*>(params);
  copy_to_shared(args.c, p.c);
  if (!begin_block(args.c.call, args.words, args.state, p.c.call, participation, args.header)) return;
  CudaWarp w(dynamic_shared, shape);
  const TablesHeader& header = *args.header;
  if (!takes_part(participation)) return do_nothing(p.c.call, participation, header, args.state, args.soft);
  const KernelTrace<A> trace(w, p.c.call.device_trace, Event::combine, pack_launch(p.c.call.epoch, args.state, header.tokens));
  if (threadIdx.x == 0) {
    complete(p.c, args, header);
    p.rings = ring.rings;
    p.streams = ring.streams;
    p.send_chunk = ring.send_chunk;
  }
  __syncthreads();
  const CallContext& call = p.c.call;
  if (w.index() == 0) publish_placement<A>(w, call, p.c.shape.control, p.c.staging.place);
  if (!wait_placements<A>(w, call, p.c.shape.control, Site::placement)) return Cuda::settle(w);
  const bool moves = placements_agree(w, call, p.c.shape.control, p.c.staging.place.signature);
  const bool ok = !moves || combine_ring_kernel<A>(w, p);
  Cuda::settle(w);
  if (ok && arrive_is_last<Cuda>(w, &args.state->exits)) end_combine(args, call, participation, moves);
}

}  // namespace normal

namespace {

// Rows are summed in registers; see docs/design/0010-normal-mode-on-gpus.md. The scratch holds the chunks of sums.
constexpr CudaShape shape_of(int warps, int world) {
  return {warps, 0, 0, static_cast<uint32_t>(round_up(sum_scratch_bytes(world), 16))};
}

template <class A, Body kBody>
const Kernel<const CudaCombineParams, const CudaShape> direct("combine kernel", normal::combine_kernel<A, kBody>,
                                                              kSumWarps* kLanes, [](const DeviceLimits&) {
                                                                return static_cast<int>(
                                                                    shape_of(kSumWarps, kMaxRanks).shared_bytes());
                                                              });
template <class A>
const Kernel<const CudaCombineParams, const RingParts, const CudaShape> through_rings(
    "combine kernel", normal::ring_combine_kernel<A>, kMoveWarps* kLanes, [](const DeviceLimits& limits) {
      return static_cast<int>(limits.shared_bytes) - static_cast<int>(sizeof(RingCombineParams)) - 1024;
    });

// Selects the recording kernels if the call is traced.
const auto& kernel_for(const CudaCombineParams& p) {
  const bool traced = p.c.call.device_trace.records != nullptr;
  switch (body_of(p.c)) {
    case Body::pull: return traced ? direct<CudaTraced, Body::pull> : direct<Cuda, Body::pull>;
    case Body::copies: return traced ? direct<CudaTraced, Body::copies> : direct<Cuda, Body::copies>;
    case Body::sums: return traced ? direct<CudaTraced, Body::sums> : direct<Cuda, Body::sums>;
    case Body::routes: break;
  }
  return traced ? direct<CudaTraced, Body::routes> : direct<Cuda, Body::routes>;
}
const auto& ring_kernel_for(const CudaCombineParams& p) {
  return p.c.call.device_trace.records != nullptr ? through_rings<CudaTraced> : through_rings<Cuda>;
}

}  // namespace

void launch_combine(const CudaCombineParams& p, const LaunchShape& launch, gpu::Stream stream) {
  const CudaShape shape = shape_of(launch.warps, p.c.call.world());
  kernel_for(p).launch(grid_of(launch.blocks, shape), stream, p, shape);
}

void launch_ring_combine(const CudaCombineParams& p, const RingParts& ring, int blocks, const DeviceLimits& limits,
                         gpu::Stream stream) {
  const CudaShape shape = move_shape(kMoveWarps, p.c.shape.row_bytes, 0, sizeof(RingCombineParams), limits.shared_bytes);
  ring_kernel_for(p).launch(grid_of(blocks, shape), stream, p, ring, shape);
}

}  // namespace switchyard::detail

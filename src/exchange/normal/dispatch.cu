// SPDX-License-Identifier: Apache-2.0
// The dispatch kernels: protocol/normal/dispatch_direct.hpp or protocol/normal/dispatch_ring.hpp with one block per
// multiprocessor.
//
// Progress of direct dispatch: a warp waits for rows and for placements, which other ranks send before they wait for anything
// except counts. Rows are announced by the sending warps. On this rank, these are in lower blocks; if all blocks send, they
// send their own shares before they wait. All blocks of an expert-major call must therefore be able to run concurrently, so the
// launcher limits the grid to one block per multiprocessor. In a rank-major call, one warp waits for rows and the others
// return. With rings, a warp may wait for any warp of any rank. All blocks of all ranks must therefore be resident, so the
// launcher gives each block a multiprocessor that no other rank uses. Every warp polls all its streams in turn and stops at the
// deadline. Other kernels may delay a block as long as they end.
#include "arch/cuda/cuda_traced.cuh"
#include "base/call_signature.hpp"
#include "exchange/normal/frame.cuh"
#include "exchange/normal/hosts/complete.cuh"
#include "protocol/normal/dispatch_ring.hpp"

namespace switchyard::detail {

namespace {

/// The table header of a cached dispatch, written by an earlier dispatch; null for a fresh dispatch.
__device__ const TablesHeader* handle_of(const CudaDispatchParams& p) { return p.d.shape.with_records ? nullptr : p.header; }

/// The signature compared by ranks. For a cached dispatch, it includes the identity of the dispatch that made its tables, which
/// the host does not know.
__device__ uint64_t signature_of(const CudaDispatchParams& p, const TablesHeader& header) {
  return p.d.shape.with_records ? p.place.signature : mix_signature(p.place.signature, header.identity);
}

/// The last step of the call. Call from one warp, after all warps have read the header.
__device__ void end_dispatch(const CudaDispatchParams& args, const CallContext& call, Participation participation, bool moved) {
  TablesHeader& header = *args.header;
  const bool fresh = args.d.shape.with_records;
  if (!moved && header.status == 0) {
    int failed_rank = -1;
    const Placement* failed =
        end_unmoved(call, args.words, args.d.shape.control, args.state, participation, args.soft, failed_rank);
    if (!fresh || failed == nullptr || threadIdx.x % kLanes != 0) return;
    header.status = static_cast<int32_t>(failed->status);
    header.failed_rank = failed_rank;
    return;
  }
  if (moved && fresh && threadIdx.x % kLanes == 0) header.moved = 1;
  end_call(args.state, call.epoch, participation);
}

}  // namespace

namespace normal {

template <class A>
__global__ void __launch_bounds__(kMoveWarps* kLanes, 1)
    dispatch_kernel(const __grid_constant__ CudaDispatchParams args, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CudaDispatchParams)];
  __shared__ Participation participation;
  __shared__ uint64_t sends_of_block[kRowChunks];
  auto& p = *reinterpret_cast<CudaDispatchParams*>(params);
  copy_to_shared(args, p);
  ptx::wait_for_previous();
  if (!begin_block(args.d.call, args.words, args.state, p.d.call, participation, handle_of(args))) return;
  CudaWarp w(dynamic_shared, shape);
  const CallContext& call = p.d.call;
  const TablesHeader& header = *args.header;
  if (!takes_part(participation)) return do_nothing(call, participation, header, args.state, args.soft);
  const KernelTrace<A> trace(w, call.device_trace, Event::dispatch, pack_launch(call.epoch, args.state, header.tokens));
  if (threadIdx.x == 0) {
    p.d.tokens = header.tokens;
    p.place.signature = signature_of(args, header);
    p.d.work.sends_of_block.first = sends_of_block;
  }
  if (threadIdx.x < kRowChunks) sends_of_block[threadIdx.x] = 0;
  __syncthreads();
  if (p.offers_place && w.index() == 0)
    publish_placement<A>(w, call, p.d.shape.control, p.place, nullptr, p.own_rows != p.place.rows ? &p.own_rows : nullptr);
  bool moves = header.status == 0;
  if (moves) {
    if (!wait_placements<A>(w, call, p.d.shape.control, Site::placement)) return Cuda::settle(w);
    moves = placements_agree(w, call, p.d.shape.control, p.place.signature);
  }
  if (moves) {
    fill_rest(w, p.d.shape.layout, p.rest, header.rows, header.num_records);
    const bool ok = dispatch_direct<A>(w, p.d);
    Cuda::settle(w);
    // The call is over when all warps have begun; see dispatch_direct.
    if (ok && (p.d.work.send_blocks > 0 ? arrive_is_last<Cuda>(w, &args.state->exits) : w.index() == 0))
      end_dispatch(args, call, participation, true);
  } else if (arrive_is_last<Cuda>(w, &args.state->exits)) {
    end_dispatch(args, call, participation, false);
  }
}

template <class A>
__global__ void __launch_bounds__(kMoveWarps* kLanes, 1)
    ring_dispatch_kernel(const __grid_constant__ CudaDispatchParams args, const __grid_constant__ RingParts ring,
                         const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(RingDispatchParams)];
  __shared__ Placement place;
  __shared__ Participation participation;
  auto& p = *reinterpret_cast<RingDispatchParams*>(params);
  copy_to_shared(args.d, p.d);
  if (threadIdx.x == 0) {
    p.rings = ring.rings;
    p.mine = ring.mine;
    p.streams = ring.streams;
    p.send_chunk = ring.send_chunk;
  }
  ptx::wait_for_previous();
  if (!begin_block(args.d.call, args.words, args.state, p.d.call, participation, handle_of(args))) return;
  CudaWarp w(dynamic_shared, shape);
  const CallContext& call = p.d.call;
  const TablesHeader& header = *args.header;
  if (!takes_part(participation)) return do_nothing(call, participation, header, args.state, args.soft);
  const KernelTrace<A> trace(w, call.device_trace, Event::dispatch, pack_launch(call.epoch, args.state, header.tokens));
  const uint64_t signature = signature_of(args, header);
  if (threadIdx.x == 0) {
    p.d.tokens = header.tokens;
    place = args.place;
    place.signature = signature;
  }
  __syncthreads();
  if (args.offers_place && w.index() == 0) publish_placement<A>(w, call, p.d.shape.control, place);
  bool moves = header.status == 0;
  if (moves) {
    if (!wait_placements<A>(w, call, p.d.shape.control, Site::placement)) return Cuda::settle(w);
    moves = placements_agree(w, call, p.d.shape.control, signature);
  }
  if (moves) {
    fill_rest(w, args.d.shape.layout, args.rest, header.rows, header.num_records);
    const bool ok = dispatch_ring<A>(w, p);
    Cuda::settle(w);
    if (!ok) return;
  }
  if (arrive_is_last<Cuda>(w, &args.state->exits)) end_dispatch(args, call, participation, moves);
}

/// Rank-major layout with drops: counts the kept routes from the received records. Runs as one block and does not wait.
__global__ void count_kept_kernel(const __grid_constant__ PlanParams p, const __grid_constant__ Received received) {
  const TablesHeader& h = *p.tables.header;
  if (ptx::load_relaxed<Scope::system>(p.call.abort_word) != 0 || h.moved == 0) return;
  const int local_experts = p.map.count(p.call.heap.rank), first = p.map.first(p.call.heap.rank), world = p.map.world;
  auto* counts = reinterpret_cast<unsigned long long*>(p.tables.local_dropped);
  for (int i = threadIdx.x; i < world * local_experts; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  const auto* route = reinterpret_cast<const int32_t*>(received.records + received.layout.route_at());
  for (int s = 0; s < world; ++s)
    for (int64_t i = h.record_begin[s] * p.topk + threadIdx.x; i < h.record_begin[s + 1] * p.topk; i += blockDim.x)
      if (route[i] >= 0) atomicAdd(&counts[static_cast<int64_t>(s) * local_experts + route[i]], 1ull);
  __syncthreads();
  const int64_t row_bytes = p.control.counts_row_bytes();
  for (int el = threadIdx.x; el < local_experts; el += blockDim.x) {
    int64_t kept = 0;
    for (int s = 0; s < world; ++s) {
      const auto* routes = reinterpret_cast<const int32_t*>(p.tables.counts + s * row_bytes + sizeof(CountsHead)) + world;
      int64_t& dropped = p.tables.local_dropped[static_cast<int64_t>(s) * local_experts + el];
      kept += dropped;
      dropped = routes[first + el] - dropped;
    }
    p.tables.kept[el] = kept;
    p.tables.aligned[el] = round_up(kept, p.alignment);
  }
}

}  // namespace normal

namespace {

template <class P>
int max_shared(const DeviceLimits& limits) {
  return static_cast<int>(limits.shared_bytes) - static_cast<int>(sizeof(P)) - 1024;
}
template <class A>
const Kernel<const CudaDispatchParams, const CudaShape> direct("dispatch kernel", normal::dispatch_kernel<A>,
                                                               kMoveWarps* kLanes, max_shared<CudaDispatchParams>);
template <class A>
const Kernel<const CudaDispatchParams, const RingParts, const CudaShape> through_rings("dispatch kernel",
                                                                                       normal::ring_dispatch_kernel<A>,
                                                                                       kMoveWarps* kLanes,
                                                                                       max_shared<RingDispatchParams>);

// Selects the recording kernels if the call is traced.
const auto& kernel_for(const CudaDispatchParams& p) {
  return p.d.call.device_trace.records != nullptr ? direct<CudaTraced> : direct<Cuda>;
}
const auto& ring_kernel_for(const CudaDispatchParams& p) {
  return p.d.call.device_trace.records != nullptr ? through_rings<CudaTraced> : through_rings<Cuda>;
}

uint32_t scratch_bytes(const DispatchParams& d) {
  if (d.shape.quantize == ScaleKind::none) return 0;
  return static_cast<uint32_t>(round_up(d.shape.row_bytes, 128) + round_up(d.shape.scale_bytes, 128));
}

constexpr int kCountThreads = 512;
const Kernel<const PlanParams, const Received> count_kept("count kernel", normal::count_kept_kernel, kCountThreads,
                                                          [](const DeviceLimits&) { return 0; });

}  // namespace

void launch_dispatch(const CudaDispatchParams& p, bool after_plan, const LaunchShape& launch, const DeviceLimits& limits,
                     gpu::Stream stream) {
  const CudaShape shape =
      move_shape(launch.warps, p.d.shape.row_bytes, scratch_bytes(p.d), sizeof p, limits.shared_bytes, launch.stages);
  kernel_for(p).launch(grid_of(launch.blocks, shape, after_plan && limits.dependent_launches), stream, p, shape);
}

void launch_ring_dispatch(const CudaDispatchParams& p, const RingParts& ring, bool after_plan, int blocks,
                          const DeviceLimits& limits, gpu::Stream stream) {
  // Rows are quantized directly into the ring, so no scratch is needed.
  const CudaShape shape = move_shape(kMoveWarps, p.d.shape.row_bytes, 0, sizeof(RingDispatchParams), limits.shared_bytes);
  ring_kernel_for(p).launch(grid_of(blocks, shape, after_plan && limits.dependent_launches), stream, p, ring, shape);
}

void launch_count_kept(const PlanParams& p, const Received& received, gpu::Stream stream) {
  count_kept.launch({1, kCountThreads, 0}, stream, p, received);
}

}  // namespace switchyard::detail

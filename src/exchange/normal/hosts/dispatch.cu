// SPDX-License-Identifier: Apache-2.0
// Dispatch over several hosts on GPUs, after all placements agree: first own rows, then packing, NCCL and forwarding in each
// round, and finally completion. The steps are those of protocol/hosts/forward.hpp, split where a kernel would wait for the
// network.
//
// | flag | written by                                | read by          | order           | scope  | reuse              |
// | rows | source's, or its proxy's, last warp       | receiver's warps | release/acquire | system | epoch, never reset |
//
// Progress: only the completion step waits, for `rows` from all sources. On each rank of this host, these flags are set by
// earlier kernels in stream order, which wait for no other kernel and for other ranks only through rounds.
#include "exchange/normal/frame.cuh"
#include "exchange/normal/hosts/frame.cuh"

namespace switchyard::detail {

namespace {

/// Copies the parameters to shared memory and adds the values that the host does not know. Call from all threads. Returns false
/// if the group has failed.
__device__ bool begin_move(const CudaDispatchParams& args, CudaDispatchParams& p) {
  copy_to_shared(args, p);
  __syncthreads();
  if (!begin_hosts_block(args.d.call, args.state, p.d.call)) return false;
  if (threadIdx.x == 0) p.d.tokens = args.header->tokens;
  __syncthreads();
  return true;
}

/// Source side: writes the head of crossing row `slot` of token t. Call from all lanes.
__device__ void pack_head(const DispatchParams& p, const RailRound& r, int64_t t, std::byte* slot) {
  const CrossingLayout& at = r.layout;
  const int lane = threadIdx.x % kLanes;
  const SendEntry none{-1, -1, -1};
  const SendEntry mine = lane < p.tables.sends.places(t) ? p.tables.sends.of(t)[lane] : none;
  const bool is_sent = mine.rank >= 0 && (r.host_ranks >> mine.rank & 1u) != 0;
  const unsigned lanes = __ballot_sync(kAllLanes, is_sent);
  auto* const places = reinterpret_cast<SendEntry*>(slot + at.places_at());
  if (is_sent) places[__popc(lanes & ((1u << lane) - 1u))] = mine;
  if (lane >= __popc(lanes) && lane < at.max_places) places[lane] = none;
  if (lane == 0) *reinterpret_cast<CrossingHead*>(slot) = {t, __popc(lanes)};
  if (lane >= at.topk) return;
  const int64_t f = t * at.topk + lane;
  reinterpret_cast<int32_t*>(slot + at.ids_at())[lane] = p.tables.ids[f];
  if (at.expert_major) reinterpret_cast<int32_t*>(slot + at.rows_at())[lane] = p.tables.route_row[f];
  if (at.weights) reinterpret_cast<float*>(slot + at.weights_at())[lane] = p.shape.weights[f];
}

/// Proxy side: stores the head of crossing row `slot` for token number n. Call from all lanes.
__device__ void keep_head(const RailRound& r, int64_t n, const std::byte* slot) {
  const CrossingLayout& at = r.layout;
  const CrossedTables& to = r.crossed;
  const int lane = threadIdx.x % kLanes;
  if (lane == 0) to.token[n] = static_cast<int32_t>(reinterpret_cast<const CrossingHead*>(slot)->token);
  if (lane < to.stride) to.sends[n * to.stride + lane] = reinterpret_cast<const SendEntry*>(slot + at.places_at())[lane];
  if (lane < at.topk) {
    const int64_t f = n * at.topk + lane;
    to.ids[f] = reinterpret_cast<const int32_t*>(slot + at.ids_at())[lane];
    if (at.expert_major) to.route_row[f] = reinterpret_cast<const int32_t*>(slot + at.rows_at())[lane];
    if (at.weights) to.weights[f] = reinterpret_cast<const float*>(slot + at.weights_at())[lane];
  }
  __syncwarp();
}

/// Converts `p` to the source's call as made by its proxy; its tokens are the crossing tokens, by number.
__device__ void make_forwarding(DispatchParams& p, const RailRound& r) {
  p.tokens = r.count;
  p.shape.weights = r.layout.weights ? r.crossed.weights : nullptr;
  p.tables.sends = SendTable{r.crossed.sends, nullptr, r.crossed.stride};
  p.tables.ids = r.crossed.ids;
  p.tables.route_row = r.crossed.route_row;
}

/// Proxy side: sets the source's flags once all its rows have been forwarded. Receivers treat the rows as the source's first
/// chunk and find the other chunks empty. Call from one warp.
template <class A>
__device__ void announce_rows(CudaWarp& w, const DispatchParams& p, const RailRound& r) {
  const CallContext& call = p.call;
  const auto* const touching = reinterpret_cast<const int32_t*>(r.counts + sizeof(CountsHead));
  const bool in_chunks = p.shape.layout == Layout::expert_major;
  for (int c = 0; c < (in_chunks ? kRowChunks : 1); ++c) {
    A::template publish_to<Scope::system>(
        w, call.world(),
        [&](int d) {
          const auto records = in_chunks ? static_cast<uint64_t>(touching[d]) : 0;
          return FlagStore{reach<A>(call.heap, d, p.shape.control.rows_flag(r.source, c)), flag_word(call.epoch, records)};
        },
        Site::rows);
  }
}

}  // namespace

namespace normal {

template <class A>
__global__ void __launch_bounds__(kMoveWarps* kLanes, 1)
    send_hosts_kernel(const __grid_constant__ CudaDispatchParams args, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CudaDispatchParams)];
  auto& p = *reinterpret_cast<CudaDispatchParams*>(params);
  if (!begin_move(args, p)) return;
  CudaWarp w(dynamic_shared, shape);
  MoveCounter moved;
  send_own_rows<A>(w, p.d, p.d.shape.layout == Layout::expert_major ? kRowChunks - 1 : 0, moved);
  zero_padding<A>(w, p.d, destination(p.d, p.d.call.rank()), share_of_blocks(w, 0, w.num_blocks()));
  A::settle(w);
  add_moved(w, p.d.call, moved);
}

template <class A>
__global__ void __launch_bounds__(kMoveWarps* kLanes, 1)
    pack_hosts_kernel(const __grid_constant__ CudaDispatchParams args, const __grid_constant__ RailRound r,
                      const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CudaDispatchParams)];
  auto& p = *reinterpret_cast<CudaDispatchParams*>(params);
  if (!begin_move(args, p)) return;
  CudaWarp w(dynamic_shared, shape);
  const CrossingLayout& at = r.layout;
  const MoveShape& s = p.d.shape;
  MoveCounter moved;
#pragma unroll 1
  for (int64_t n = r.first + w.index(); n < r.end; n += w.total()) {
    const int64_t t = r.leaving[n];
    std::byte* const slot = r.slot + (n - r.first) * at.bytes();
    if (at.headers) pack_head(p.d, r, t, slot);
    std::byte *const row = slot + at.row_at(), *const scale = slot + at.scale_at();
    const std::byte* const x = s.x + t * s.src_row_bytes;
    if (s.quantize != ScaleKind::none) {
      A::quantize_row(w, reinterpret_cast<uint8_t*>(row), scale, x, s.src_type, s.hidden, s.quantize);
    } else {
      A::copy(w, row, x, static_cast<size_t>(at.row_bytes));
      if (s.scales) A::copy(w, scale, s.scales + t * at.scale_bytes, static_cast<size_t>(at.scale_bytes));
    }
    moved.network_bytes += static_cast<uint64_t>(at.row_bytes + at.scale_bytes);
    moved.metadata_bytes += static_cast<uint64_t>(at.row_at());
  }
  A::settle(w);
  add_moved(w, p.d.call, moved);
}

template <class A>
__global__ void __launch_bounds__(kMoveWarps* kLanes, 1)
    forward_hosts_kernel(const __grid_constant__ CudaDispatchParams args, const __grid_constant__ RailRound r,
                         const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CudaDispatchParams)];
  auto& p = *reinterpret_cast<CudaDispatchParams*>(params);
  if (!begin_move(args, p)) return;
  if (threadIdx.x == 0) make_forwarding(p.d, r);
  __syncthreads();
  CudaWarp w(dynamic_shared, shape);
  const CrossingLayout& at = r.layout;
  const int places = r.crossed.stride;
#pragma unroll 1
  for (int64_t n = r.first + w.index(); n < r.end; n += w.total()) {
    const std::byte* const slot = r.slot + (n - r.first) * at.bytes();
    const SendEntry* const entries = r.crossed.sends + n * places;
    if (at.headers) {
      keep_head(r, n, slot);
      send_records<A>(w, p.d, n, r.crossed.token[n], entries, places);
    }
    if (A::lanes_where(w, places, [&](int i) { return has_row(entries[i]); }) == 0) continue;
    send_row<A>(w, p.d, entries, places, slot + at.row_at(), at.scale_bytes > 0 ? slot + at.scale_at() : nullptr);
  }
  A::settle(w);
  if (r.last && arrive_is_last<A>(w, &args.state->exits)) announce_rows<A>(w, p.d, r);
}

template <class A>
__global__ void __launch_bounds__(kMoveWarps* kLanes, 1)
    finish_hosts_kernel(const __grid_constant__ CudaDispatchParams args, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CudaDispatchParams)];
  auto& p = *reinterpret_cast<CudaDispatchParams*>(params);
  if (!begin_move(args, p)) return;
  CudaWarp w(dynamic_shared, shape);
  const TablesHeader& header = *args.header;
  fill_rest(w, p.d.shape.layout, p.rest, header.rows, header.num_records);
  MoveCounter moved;
  if (p.d.shape.layout == Layout::expert_major) {
    const Destination mine = destination(p.d, p.d.call.rank());
    PlaceQueue<A> queue{WorkQueue<A>(p.d.work.places_next, PlaceQueue<A>::kBatch)};
    for (int c = 0; c < kRowChunks; ++c)
      if (!take_chunk<A>(w, p.d, mine, c, queue, moved)) return A::settle(w);
  } else if (w.index() == 0 && !wait_rows<A>(w, p.d, 0)) {
    return A::settle(w);
  }
  A::settle(w);
  add_moved(w, p.d.call, moved);
  if (!arrive_is_last<A>(w, &args.state->exits)) return;
  if (p.d.shape.with_records && threadIdx.x % kLanes == 0) args.header->moved = 1;
  end_hosts_call(args.state, p.d.call.epoch);
}

}  // namespace normal

namespace {

int max_shared(const DeviceLimits& limits) {
  return static_cast<int>(limits.shared_bytes) - static_cast<int>(sizeof(CudaDispatchParams)) - 1024;
}
const Kernel<const CudaDispatchParams, const CudaShape> send_own("send kernel", normal::send_hosts_kernel<CudaHosts>,
                                                                 kMoveWarps* kLanes, max_shared);
const Kernel<const CudaDispatchParams, const RailRound, const CudaShape> pack_rows("pack kernel",
                                                                                   normal::pack_hosts_kernel<CudaHosts>,
                                                                                   kMoveWarps* kLanes, max_shared);
const Kernel<const CudaDispatchParams, const RailRound, const CudaShape> forward_rows("forward kernel",
                                                                                      normal::forward_hosts_kernel<CudaHosts>,
                                                                                      kMoveWarps* kLanes, max_shared);
const Kernel<const CudaDispatchParams, const CudaShape> finish_rows("finish kernel", normal::finish_hosts_kernel<CudaHosts>,
                                                                    kMoveWarps* kLanes, max_shared);

CudaShape shape_of(const CudaDispatchParams& p, const LaunchShape& launch, const DeviceLimits& limits) {
  const MoveShape& s = p.d.shape;
  const auto scratch =
      s.quantize == ScaleKind::none ? 0u : static_cast<uint32_t>(round_up(s.row_bytes, 128) + round_up(s.scale_bytes, 128));
  return move_shape(launch.warps, s.row_bytes, scratch, sizeof p, limits.shared_bytes, launch.stages);
}

}  // namespace

void launch_send(const CudaDispatchParams& p, const LaunchShape& launch, const DeviceLimits& limits, gpu::Stream stream) {
  const CudaShape shape = shape_of(p, launch, limits);
  send_own.launch(grid_of(launch.blocks, shape), stream, p, shape);
}
void launch_pack(const CudaDispatchParams& p, const RailRound& round, const LaunchShape& launch, const DeviceLimits& limits,
                 gpu::Stream stream) {
  const CudaShape shape = shape_of(p, launch, limits);
  pack_rows.launch(grid_of(launch.blocks, shape), stream, p, round, shape);
}
void launch_forward(const CudaDispatchParams& p, const RailRound& round, const LaunchShape& launch, const DeviceLimits& limits,
                    gpu::Stream stream) {
  const CudaShape shape = shape_of(p, launch, limits);
  forward_rows.launch(grid_of(launch.blocks, shape), stream, p, round, shape);
}
void launch_finish(const CudaDispatchParams& p, const LaunchShape& launch, const DeviceLimits& limits, gpu::Stream stream) {
  const CudaShape shape = shape_of(p, launch, limits);
  finish_rows.launch(grid_of(launch.blocks, shape), stream, p, shape);
}

}  // namespace switchyard::detail

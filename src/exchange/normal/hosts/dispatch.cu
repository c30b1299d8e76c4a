// SPDX-License-Identifier: Apache-2.0
// Dispatch over several hosts on GPUs, after all placements agree: a kernel for each phase of protocol/hosts/dispatch.hpp.
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

/// begin_move() for the kernels that make the call of a rail's peer.
__device__ bool begin_forwarding(const CudaDispatchParams& args, const DispatchRail& rail, CudaDispatchParams& p) {
  if (!begin_move(args, p)) return false;
  if (threadIdx.x == 0) set_forwarding(p.d, rail);
  __syncthreads();
  return true;
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
  send_own_rows<A>(w, p.d, moved);
  add_moved<A>(w, p.d.call, moved);
}

template <class A>
__global__ void __launch_bounds__(kMoveWarps* kLanes, 1)
    pack_hosts_kernel(const __grid_constant__ CudaDispatchParams args, const __grid_constant__ DispatchRail rail,
                      const __grid_constant__ int64_t round, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CudaDispatchParams)];
  auto& p = *reinterpret_cast<CudaDispatchParams*>(params);
  if (!begin_move(args, p)) return;
  CudaWarp w(dynamic_shared, shape);
  MoveCounter moved;
  pack_rows<A>(w, p.d, rail, round, moved);
  add_moved<A>(w, p.d.call, moved);
}

template <class A>
__global__ void __launch_bounds__(kMoveWarps* kLanes, 1)
    forward_hosts_kernel(const __grid_constant__ CudaDispatchParams args, const __grid_constant__ DispatchRail rail,
                         const __grid_constant__ int64_t round, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CudaDispatchParams)];
  auto& p = *reinterpret_cast<CudaDispatchParams*>(params);
  if (!begin_forwarding(args, rail, p)) return;
  CudaWarp w(dynamic_shared, shape);
  forward_rows<A>(w, p.d, rail, round);
}

template <class A>
__global__ void __launch_bounds__(kMoveWarps* kLanes, 1)
    count_hosts_kernel(const __grid_constant__ CudaDispatchParams args, const __grid_constant__ DispatchRail rail,
                       const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CudaDispatchParams)];
  auto& p = *reinterpret_cast<CudaDispatchParams*>(params);
  if (!begin_move(args, p)) return;
  CudaWarp w(dynamic_shared, shape);
  count_returned<A>(w, p.d, rail);
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
  if (!finish_rows<A>(w, p.d, moved)) return A::settle(w);
  A::settle(w);
  add_moved<A>(w, p.d.call, moved);
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
using RailKernel = Kernel<const CudaDispatchParams, const DispatchRail, const int64_t, const CudaShape>;
const RailKernel pack("pack kernel", normal::pack_hosts_kernel<CudaHosts>, kMoveWarps* kLanes, max_shared);
const RailKernel forward("forward kernel", normal::forward_hosts_kernel<CudaHosts>, kMoveWarps* kLanes, max_shared);
const Kernel<const CudaDispatchParams, const DispatchRail, const CudaShape> count("count kernel",
                                                                                  normal::count_hosts_kernel<CudaHosts>,
                                                                                  kMoveWarps* kLanes, max_shared);
const Kernel<const CudaDispatchParams, const CudaShape> end_rows("finish kernel", normal::finish_hosts_kernel<CudaHosts>,
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
void launch_pack(const CudaDispatchParams& p, const DispatchRail& rail, int64_t round, const LaunchShape& launch,
                 const DeviceLimits& limits, gpu::Stream stream) {
  const CudaShape shape = shape_of(p, launch, limits);
  pack.launch(grid_of(launch.blocks, shape), stream, p, rail, round, shape);
}
void launch_forward(const CudaDispatchParams& p, const DispatchRail& rail, int64_t round, const LaunchShape& launch,
                    const DeviceLimits& limits, gpu::Stream stream) {
  const CudaShape shape = shape_of(p, launch, limits);
  forward.launch(grid_of(launch.blocks, shape), stream, p, rail, round, shape);
}
void launch_count(const CudaDispatchParams& p, const DispatchRail& rail, const LaunchShape& launch, const DeviceLimits& limits,
                  gpu::Stream stream) {
  const CudaShape shape = shape_of(p, launch, limits);
  count.launch(grid_of(launch.blocks, shape), stream, p, rail, shape);
}
void launch_finish(const CudaDispatchParams& p, const LaunchShape& launch, const DeviceLimits& limits, gpu::Stream stream) {
  const CudaShape shape = shape_of(p, launch, limits);
  end_rows.launch(grid_of(launch.blocks, shape), stream, p, shape);
}

}  // namespace switchyard::detail

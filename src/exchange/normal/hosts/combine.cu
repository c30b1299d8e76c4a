// SPDX-License-Identifier: Apache-2.0
// Combine over several hosts on GPUs, after all placements agree: a kernel for each phase of protocol/hosts/combine.hpp.
//
// | flag    | written by                | read by          | order           | scope  | reuse              |
// | outputs | ranks that copy or sum    | owners, proxies  | release/acquire | system | epoch, never reset |
// | pulled  | last warp of owner, proxy | expert's warp 0  | release/acquire | system | epoch, never reset |
//
// Progress: the `outputs` flags of this host's ranks are set by a kernel that never waits; the wait for `pulled` is the last
// step.
#include "exchange/normal/frame.cuh"
#include "exchange/normal/hosts/frame.cuh"
#include "protocol/normal/combine_sums.hpp"

namespace switchyard::detail {

namespace {

/// Copies the parameters to shared memory and adds the values that the host does not know. Call from all threads. Returns false
/// if the group has failed.
__device__ bool begin_sum(const CudaCombineParams& args, CombineParams& c) {
  copy_to_shared(args.c, c);
  __syncthreads();
  if (!begin_hosts_block(args.c.call, args.state, c.call)) return false;
  if (threadIdx.x == 0) complete(c, args, *args.header);
  __syncthreads();
  return true;
}

}  // namespace

namespace normal {

template <class A>
__global__ void __launch_bounds__(kSumWarps* kLanes, 1)
    make_hosts_kernel(const __grid_constant__ CudaCombineParams args, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CombineParams)];
  auto& c = *reinterpret_cast<CombineParams*>(params);
  if (!begin_sum(args, c)) return;
  CudaWarp w(dynamic_shared, shape);
  MoveCounter moved;
  make_rows<A>(w, c, moved);
  add_moved<A>(w, c.call, moved);
}

template <class A>
__global__ void __launch_bounds__(kSumWarps* kLanes, 1)
    give_hosts_kernel(const __grid_constant__ CudaCombineParams args, const __grid_constant__ CombineRail rail,
                      const __grid_constant__ int64_t round, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CombineParams)];
  auto& c = *reinterpret_cast<CombineParams*>(params);
  if (!begin_sum(args, c)) return;
  if (threadIdx.x == 0) set_giving(c, rail, args.header->any_weights != 0);
  __syncthreads();
  CudaWarp w(dynamic_shared, shape);
  if (!give_rows<A>(w, c, rail, round)) A::settle(w);
}

template <class A>
__global__ void __launch_bounds__(kSumWarps* kLanes, 1)
    add_hosts_kernel(const __grid_constant__ CudaCombineParams args, const __grid_constant__ ReturningHosts hosts,
                     const __grid_constant__ ReturnedTokens own, const __grid_constant__ int64_t round,
                     const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CombineParams)];
  auto& c = *reinterpret_cast<CombineParams*>(params);
  if (!begin_sum(args, c)) return;
  CudaWarp w(dynamic_shared, shape);
  if (!add_rows<A>(w, c, hosts, own, round)) return A::settle(w);
  if (round + 1 == hosts.rounds && arrive_is_last<A>(w, &args.state->exits)) end_hosts_call(args.state, c.call.epoch);
}

}  // namespace normal

namespace {

constexpr CudaShape shape_of(int warps, int world) {
  return {warps, 0, 0, static_cast<uint32_t>(round_up(sum_scratch_bytes(world), 16))};
}
constexpr auto kMaxShared = [](const DeviceLimits&) { return static_cast<int>(shape_of(kSumWarps, kMaxRanks).shared_bytes()); };

const Kernel<const CudaCombineParams, const CudaShape> make("make kernel", normal::make_hosts_kernel<CudaHosts>,
                                                            kSumWarps* kLanes, kMaxShared);
const Kernel<const CudaCombineParams, const CombineRail, const int64_t, const CudaShape> give(
    "give kernel", normal::give_hosts_kernel<CudaHosts>, kSumWarps* kLanes, kMaxShared);
const Kernel<const CudaCombineParams, const ReturningHosts, const ReturnedTokens, const int64_t, const CudaShape> add(
    "add kernel", normal::add_hosts_kernel<CudaHosts>, kSumWarps* kLanes, kMaxShared);

}  // namespace

void launch_make(const CudaCombineParams& p, const LaunchShape& launch, gpu::Stream stream) {
  const CudaShape shape = shape_of(launch.warps, p.c.call.world());
  make.launch(grid_of(launch.blocks, shape), stream, p, shape);
}
void launch_give(const CudaCombineParams& p, const CombineRail& rail, int64_t round, const LaunchShape& launch,
                 gpu::Stream stream) {
  const CudaShape shape = shape_of(launch.warps, p.c.call.world());
  give.launch(grid_of(launch.blocks, shape), stream, p, rail, round, shape);
}
void launch_add(const CudaCombineParams& p, const ReturningHosts& hosts, const ReturnedTokens& own, int64_t round,
                const LaunchShape& launch, gpu::Stream stream) {
  const CudaShape shape = shape_of(launch.warps, p.c.call.world());
  add.launch(grid_of(launch.blocks, shape), stream, p, hosts, own, round, shape);
}

}  // namespace switchyard::detail

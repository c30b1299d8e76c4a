// SPDX-License-Identifier: Apache-2.0
// The dispatch kernels of low-latency mode over several hosts: protocol/hosts/low_latency_phases.hpp.
//
// Progress: as in exchange/low_latency/dispatch.cu, for the ranks of one host. Sending and forwarding never wait; receiving
// waits for rows that ranks of this host send and forward before waiting themselves.
#include "arch/cuda/cuda_hosts.cuh"
#include "exchange/hosts/frame.cuh"
#include "exchange/low_latency/frame.cuh"
#include "exchange/low_latency/hosts/launch.hpp"

namespace switchyard::detail {

namespace low_latency {

template <class A>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    send_hosts_kernel(const __grid_constant__ CudaHostsDispatch args, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(LowLatencyDispatchParams)];
  auto& p = *reinterpret_cast<LowLatencyDispatchParams*>(params);
  const CallWords words = load_hosts_call_words(args.d.call, args.state);
  const EarlyIds ids = load_ids(args.d.ids, static_cast<int>(threadIdx.x), args.d.tokens * args.d.layout.topk);
  CudaWarp w(dynamic_shared, shape);
  const int tokens = tokens_now(args.d.tokens, args.device_tokens);
  const uint32_t version = version_now(args.map_version);
  copy_to_shared(args.d, p);
  clear_sets(args.d, dynamic_shared, shape);
  __syncthreads();
  fence_entry(w);
  stage_sending(args.d, ids, tokens, dynamic_shared, shape, p);
  if (threadIdx.x == 0) p.map_version = version;
  if (!begin_block(args.d.call, words, args.state, false, p.call)) return;
  low_latency_send<A>(w, p);
  const uint64_t crossed = pack_crossing<A>(w, p, args.remote);
  A::for_lanes(w, 1, [&](int) { p.call.moved[w.index()].network_bytes += crossed; });
  A::settle(w);
  if (is_announcer(w)) publish_round(args.watch.begun, p.call);
}

template <class A>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    deliver_hosts_kernel(const __grid_constant__ CudaHostsDispatch args, const __grid_constant__ CudaShape shape,
                         const LaunchedPhases phases) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(LowLatencyDispatchParams)];
  auto& p = *reinterpret_cast<LowLatencyDispatchParams*>(params);
  const CallWords words = load_hosts_call_words(args.d.call, args.state);
  CudaWarp w(dynamic_shared, shape);
  copy_to_shared(args.d, p);
  __syncthreads();
  if (!begin_block(args.d.call, words, args.state, phases.second, p.call)) return;
  if (phases.first && is_announcer(w)) publish_round(args.watch.ended, p.call);
  if (phases.first && !forward_crossing_tokens<A>(w, p, args.remote, args.crossed)) return A::settle(w);
  if (phases.second) (void)low_latency_receive<A>(w, p);
  A::settle(w);
}

}  // namespace low_latency

namespace {

const Kernel<const CudaHostsDispatch, const CudaShape> send("low-latency send kernel",
                                                            low_latency::send_hosts_kernel<CudaLanesHosts>,
                                                            kLowLatencyWarps* kLanes, max_low_latency_shared);
const Kernel<const CudaHostsDispatch, const CudaShape, const LaunchedPhases> deliver(
    "low-latency deliver kernel", low_latency::deliver_hosts_kernel<CudaLanesHosts>, kLowLatencyWarps* kLanes,
    max_low_latency_shared);

}  // namespace

void launch_send(const CudaHostsDispatch& p, int blocks, const DeviceLimits& limits, gpu::Stream stream) {
  const CudaShape shape = low_latency_shape(p.warps, p.d.tokens, p.d.layout.topk, p.d.layout.map.experts, limits);
  send.launch(grid_of(blocks, shape), stream, p, shape);
}
void launch_deliver(const CudaHostsDispatch& p, LaunchedPhases phases, int blocks, gpu::Stream stream) {
  const CudaShape shape{p.warps, 0, 0, kScratch};
  deliver.launch(grid_of(blocks, shape), stream, p, shape, phases);
}

}  // namespace switchyard::detail

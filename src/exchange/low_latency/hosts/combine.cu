// SPDX-License-Identifier: Apache-2.0
// The combine kernels of low-latency mode over several hosts: protocol/hosts/low_latency_phases.hpp.
//
// Progress: as in exchange/low_latency/combine.cu, for the ranks of one host. All warps return rows before they collect any,
// and they collect only rows returned by ranks of this host. Summing waits for the rows that these ranks return and announce
// after their rounds.
#include "arch/cuda/cuda_hosts.cuh"
#include "exchange/hosts/frame.cuh"
#include "exchange/low_latency/frame.cuh"
#include "exchange/low_latency/hosts/launch.hpp"

namespace switchyard::detail {

namespace {

/// Copies the parameters to shared memory. Call from all threads. Returns false if the group has failed.
__device__ bool begin_combine(const CudaHostsCombine& args, const CudaWarp& w, bool ends_call, PhasedCombineParams& p) {
  const CallWords words = load_hosts_call_words(args.c.call, args.state);
  const uint64_t combined = load_combined(args.c);
  copy_to_shared(args.c, p);
  __syncthreads();
  fence_entry(w);
  if (threadIdx.x == 0) p.combined = combined;
  return begin_block(args.c.call, words, args.state, ends_call, p.call);
}

}  // namespace

namespace low_latency {

template <class A>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    give_hosts_kernel(const __grid_constant__ CudaHostsCombine args, const __grid_constant__ CudaShape shape,
                      const LaunchedPhases phases) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(PhasedCombineParams)];
  auto& p = *reinterpret_cast<PhasedCombineParams*>(params);
  CudaWarp w(dynamic_shared, shape);
  if (!begin_combine(args, w, false, p)) return;
  if (phases.first) {
    low_latency_return<A>(w, p);
    if (is_announcer(w)) write_combine_heads<A>(w, p);
  }
  if (phases.second && collect_returned<A>(w, p, 0) && is_announcer(w)) publish_round(args.watch.begun, p.call);
  A::settle(w);
}

template <class A>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    sum_hosts_kernel(const __grid_constant__ CudaHostsCombine args, const __grid_constant__ CudaShape shape,
                     const LaunchedPhases phases) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(PhasedCombineParams)];
  auto& p = *reinterpret_cast<PhasedCombineParams*>(params);
  CudaWarp w(dynamic_shared, shape);
  if (!begin_combine(args, w, phases.second, p)) return;
  if (phases.first && is_announcer(w)) {
    publish_round(args.watch.ended, p.call);
    if (!announce_entered<A>(w, p)) return A::settle(w);
  }
  if (!phases.second) return;
  if (low_latency_sum<A>(w, p)) {
    const uint64_t bytes = returned_bytes<A>(w, p);
    A::for_lanes(w, 1, [&](int) { p.call.moved[w.index()].network_bytes += bytes; });
  }
  A::settle(w);
}

}  // namespace low_latency

namespace {

constexpr auto kScratchOnly = [](const DeviceLimits&) {
  return static_cast<int>(CudaShape{kLowLatencyWarps, 0, 0, kScratch}.shared_bytes());
};
const Kernel<const CudaHostsCombine, const CudaShape, const LaunchedPhases> give("low-latency give kernel",
                                                                                 low_latency::give_hosts_kernel<CudaLanesHosts>,
                                                                                 kLowLatencyWarps* kLanes, kScratchOnly);
const Kernel<const CudaHostsCombine, const CudaShape, const LaunchedPhases> sum("low-latency sum kernel",
                                                                                low_latency::sum_hosts_kernel<CudaLanesHosts>,
                                                                                kLowLatencyWarps* kLanes, kScratchOnly);

CudaShape shape_of(const CudaHostsCombine& p) { return {p.warps, 0, 0, kScratch}; }

}  // namespace

void launch_give(const CudaHostsCombine& p, LaunchedPhases phases, int blocks, gpu::Stream stream) {
  const CudaShape shape = shape_of(p);
  give.launch(grid_of(blocks, shape), stream, p, shape, phases);
}
void launch_sum(const CudaHostsCombine& p, LaunchedPhases phases, int blocks, gpu::Stream stream) {
  const CudaShape shape = shape_of(p);
  sum.launch(grid_of(blocks, shape), stream, p, shape, phases);
}

}  // namespace switchyard::detail

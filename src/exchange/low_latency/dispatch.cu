// SPDX-License-Identifier: Apache-2.0
// The dispatch kernels of calls whose ids are used as they are.
#include "exchange/low_latency/dispatch_kernel.cuh"

namespace switchyard::detail {

namespace low_latency {

template <class A, class P>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    dispatch_kernel(const __grid_constant__ CudaLowLatencyDispatch args, const __grid_constant__ CudaShape shape,
                    const LaunchedHalves halves) {
  dispatch<A, P>(args, shape, halves, [] { return NoLookup(); });
}

}  // namespace low_latency

namespace {

/// One kernel per kind of parameters, each with and without tracing.
template <class A, class P>
const Kernel<const CudaLowLatencyDispatch, const CudaShape, const LaunchedHalves> dispatches("low-latency dispatch kernel",
                                                                                             low_latency::dispatch_kernel<A, P>,
                                                                                             kLowLatencyWarps* kLanes,
                                                                                             max_low_latency_shared);

}  // namespace

// Every launch may begin while the previous kernel on the stream is finishing; it waits for that kernel before it reads
// anything.
void launch_low_latency(const CudaLowLatencyDispatch& p, LaunchedHalves halves, int blocks, const DeviceLimits& limits,
                        gpu::Stream stream) {
  const CudaShape shape = low_latency_shape(p.warps, p.d.tokens, p.d.layout.topk, p.d.layout.map.experts, limits);
  const bool traced = p.d.call.device_trace.records != nullptr;
  const auto& kernel = with_kind(
      p.d, shape.block_bytes > 0, [&]<class P>(std::type_identity<P>) -> const auto& {
        return traced ? dispatches<TracedArch<ArchOf<P>>, P> : dispatches<ArchOf<P>, P>;
      });
  kernel.launch(grid_of(blocks, shape, limits.dependent_launches), stream, p, shape, halves);
}

}  // namespace switchyard::detail

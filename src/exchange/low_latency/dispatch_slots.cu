// SPDX-License-Identifier: Apache-2.0
// The dispatch kernels that replace the ids of a call with slots. Calls with general parameters, or with more ids and a larger
// table than fit in shared memory, use the selection kernel instead.
#include "exchange/low_latency/dispatch_kernel.cuh"

namespace switchyard::detail {

namespace low_latency {

template <class A, class P>
__global__ void __launch_bounds__(kLowLatencyWarps* kLanes, 1)
    dispatch_slots_kernel(const __grid_constant__ CudaLowLatencyDispatch args, const __grid_constant__ CudaShape shape,
                          const LaunchedHalves halves, const __grid_constant__ SlotSelection selection) {
  dispatch<A, P>(args, shape, halves, [&] { return SlotLookup(selection, args.d.layout); });
}

}  // namespace low_latency

namespace {

using DispatchSlots = Kernel<const CudaLowLatencyDispatch, const CudaShape, const LaunchedHalves, const SlotSelection>;

/// One kernel per kind of parameters, each with and without tracing.
template <class A, class P>
const DispatchSlots dispatches("low-latency dispatch kernel with slots", low_latency::dispatch_slots_kernel<A, P>,
                               kLowLatencyWarps* kLanes, max_low_latency_shared);

CudaShape shape_with(const SlotTable& table, const CudaLowLatencyDispatch& p, const DeviceLimits& limits) {
  return low_latency_shape(p.warps, p.d.tokens, p.d.layout.topk, p.d.layout.map.experts, limits,
                           round_up(table_bytes(table), 16));
}

/// Returns null if the call has general parameters.
const DispatchSlots* kernel_for(const CudaLowLatencyDispatch& p, const CudaShape& shape) {
  const bool traced = p.d.call.device_trace.records != nullptr;
  return with_kind(p.d, shape.block_bytes > 0, [&]<class P>(std::type_identity<P>) -> const DispatchSlots* {
    if constexpr (std::is_same_v<P, LowLatencyDispatchParams>)
      return nullptr;
    else
      return traced ? &dispatches<TracedArch<ArchOf<P>>, P> : &dispatches<ArchOf<P>, P>;
  });
}

}  // namespace

bool launch_low_latency(const CudaLowLatencyDispatch& p, const SlotSelection& selection, LaunchedHalves halves, int blocks,
                        const DeviceLimits& limits, gpu::Stream stream) {
  const CudaShape shape = shape_with(selection.table, p, limits);
  const auto* const kernel = kernel_for(p, shape);
  if (kernel == nullptr) return false;
  kernel->launch(grid_of(blocks, shape, limits.dependent_launches), stream, p, shape, halves, selection);
  return true;
}

}  // namespace switchyard::detail

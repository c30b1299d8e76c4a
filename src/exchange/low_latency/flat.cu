// SPDX-License-Identifier: Apache-2.0
// The whole-exchange kernels for experts that scale rows.
//
// Progress: as in dispatch.cu.
#include "exchange/low_latency/flat_kernel.cuh"
#include "exchange/low_latency/known.cuh"

namespace switchyard::detail {

namespace {

/// One kernel per kind of parameters, each with and without tracing; the general parameters come last.
template <class A, class P>
const Kernel<const CudaFlat, const CudaShape, const ScaledRows> flats("all-to-all kernel",
                                                                      low_latency::flat_kernel<A, P, ScaledRows>,
                                                                      kLowLatencyWarps* kLanes, max_low_latency_shared);

template <class P>
const auto& kernel_of(bool traced) {
  return traced ? flats<TracedArch<ArchOf<P>>, P> : flats<ArchOf<P>, P>;
}
const auto& kernel_for(const FlatParams& p, bool ids_staged, bool traced) {
  if (ids_staged && KnownFlat<DType::bf16>::holds(p)) return kernel_of<KnownFlat<DType::bf16>>(traced);
  if (ids_staged && KnownFlat<DType::f16>::holds(p)) return kernel_of<KnownFlat<DType::f16>>(traced);
  return kernel_of<FlatParams>(traced);
}

}  // namespace

// Every launch may begin while the previous kernel on the stream is finishing; it waits for that kernel before it reads
// anything.
void launch_low_latency(const CudaFlat& p, int blocks, const DeviceLimits& limits, gpu::Stream stream) {
  const CudaShape shape = low_latency_shape(p.warps, p.f.d.tokens, p.f.d.layout.topk, 0, limits);
  const auto& kernel = kernel_for(p.f, shape.block_bytes > 0, p.f.d.call.device_trace.records != nullptr);
  kernel.launch(grid_of(blocks, shape, limits.dependent_launches), stream, p, shape, ScaledRows{});
}

}  // namespace switchyard::detail

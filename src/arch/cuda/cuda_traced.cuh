// SPDX-License-Identifier: Apache-2.0
// The CUDA arch with tracing: the same ops; WarpSpan records into device memory. Kernels are compiled for both, so that tracing
// costs nothing where it is off.
#pragma once

#include "arch/cuda/cuda_arch.cuh"
#include "trace/device_trace.hpp"
#include "trace/tracer.hpp"

namespace switchyard::detail {

template <class Base>
struct TracedArch : Base {
  using Warp = CudaWarp;
  static constexpr bool kDeviceTracing = true;

  /// Cycles of this multiprocessor.
  __device__ static uint64_t ticks() { return static_cast<uint64_t>(clock64()); }

  __device__ static void record(Warp& w, const DeviceTrace& trace, uint16_t event, uint64_t begin, uint64_t end, int64_t arg,
                                uint32_t bytes) {
    if (trace.records == nullptr || w.block() >= trace.blocks || w.warp() >= trace.warps) return;
    if (threadIdx.x % kLanes == 0) {
      const int64_t track = static_cast<int64_t>(w.block()) * trace.warps + w.warp();
      const uint32_t n = trace.sizes[track]++ & (trace.capacity - 1);
      trace.records[track * trace.capacity + n] = {begin, end, arg, event, static_cast<uint16_t>(multiprocessor()), bytes};
    }
    __syncwarp();
  }

  /// Says when now is. One warp of each block, when a kernel begins and when it ends.
  __device__ static void anchor(Warp& w, const DeviceTrace& trace, Event kernel, int64_t launch) {
    if (w.warp() == 0)
      record(w, trace, DeviceRecord::kAnchor, ticks(), ptx::global_timer(), launch, static_cast<uint32_t>(kernel));
  }

 private:
  __device__ static uint32_t multiprocessor() {
    uint32_t id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
  }
};

using CudaTraced = TracedArch<Cuda>;
using CudaLanesTraced = TracedArch<CudaLanes>;
using CudaHotTraced = TracedArch<CudaHot>;

static_assert(Arch<CudaTraced> && Arch<CudaLanesTraced> && Arch<CudaHotTraced>);

/// In a kernel of either arch: from construction to destruction its records have anchors. `kernel` is what the launch does for
/// its call, `launch` pack_launch's.
template <class A>
class KernelTrace {
 public:
  __device__ KernelTrace(CudaWarp& w, const DeviceTrace& trace, Event kernel, int64_t launch)
      : w_(w), trace_(trace), kernel_(kernel), launch_(launch) {
    if constexpr (requires { A::kDeviceTracing; }) A::anchor(w_, trace_, kernel_, launch_);
  }
  __device__ ~KernelTrace() {
    if constexpr (requires { A::kDeviceTracing; }) A::anchor(w_, trace_, kernel_, launch_);
  }

 private:
  CudaWarp& w_;
  const DeviceTrace& trace_;
  Event kernel_;
  int64_t launch_;
};

}  // namespace switchyard::detail

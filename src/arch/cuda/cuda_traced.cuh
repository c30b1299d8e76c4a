// SPDX-License-Identifier: Apache-2.0
// The CUDA arch with tracing: the same ops; WarpSpan records into device memory. Kernels are compiled for both, so that tracing
// costs nothing where it is off.
#pragma once

#include "arch/cuda/cuda_arch.cuh"
#include "trace/device_trace.hpp"
#include "trace/tracer.hpp"

namespace switchyard::detail {

/// Where each warp of a block is in its track, while a traced kernel runs.
struct TrackPlace {
  uint32_t size;
  uint32_t multiprocessor;
};

/// When a block began, and for which launch.
struct BlockBegin {
  uint64_t cycles;
  uint64_t timer_ns;
  int64_t launch;
};

template <class Base>
struct TracedArch : Base {
  using Warp = CudaWarp;
  static constexpr bool kDeviceTracing = true;

  /// Cycles of this multiprocessor.
  __device__ static uint64_t ticks() { return static_cast<uint64_t>(clock64()); }

  /// Every warp before it records: its place comes out of device memory, once. Nobody waits for it before the first record.
  __device__ static void open_track(Warp& w, const DeviceTrace& trace, int64_t launch) {
    if (!has_track(w, trace)) return;
    if (threadIdx.x % kLanes == 0) {
      TrackPlace& place = places()[w.warp()];
      ptx::async_copy(&place.size, &trace.sizes[track(w, trace)]);
      place.multiprocessor = multiprocessor();
      if (w.warp() == 0) *block_begin() = {ticks(), ptx::global_timer(), launch};
    }
    __syncwarp();
  }
  /// Every warp when it records no more. One of each block leaves two anchors: when the kernel began, and now.
  __device__ static void close_track(Warp& w, const DeviceTrace& trace, Event kernel) {
    if (!has_track(w, trace)) return;
    if (w.warp() == 0) {
      const BlockBegin begin = *block_begin();
      anchor(w, trace, kernel, begin.cycles, begin.timer_ns, begin.launch);
      anchor(w, trace, kernel, ticks(), ptx::global_timer(), begin.launch);
    }
    if (threadIdx.x % kLanes == 0) {
      ptx::async_copies_wait();
      trace.sizes[track(w, trace)] = places()[w.warp()].size;
    }
  }

  /// Costs a call, looks into shared memory and two stores, for which nobody waits.
  __device__ static void record(Warp& w, const DeviceTrace& trace, uint16_t event, uint64_t begin, uint64_t end, int64_t arg,
                                uint32_t bytes) {
    if (threadIdx.x % kLanes == 0) write(trace, event, begin, end, arg, bytes);
    __syncwarp();
  }

 private:
  /// Of one lane. A function of its own: in line, at the end of each span, it takes registers that rows are summed in.
  __device__ static __noinline__ void write(const DeviceTrace& trace, uint16_t event, uint64_t begin, uint64_t end, int64_t arg,
                                            uint32_t bytes) {
    const Warp w{Warp::Bare{}};
    if (!has_track(w, trace)) return;
    ptx::async_copies_wait();
    TrackPlace& place = places()[w.warp()];
    const TrackPlace now = place;
    place.size = now.size + 1;
    trace.records[track(w, trace) * trace.capacity + (now.size & (trace.capacity - 1))] = {
        begin, end, arg, event, static_cast<uint16_t>(now.multiprocessor), bytes};
  }
  __device__ static TrackPlace* places() {
    __shared__ TrackPlace all[32];
    return all;
  }
  __device__ static BlockBegin* block_begin() {
    __shared__ BlockBegin begin;
    return &begin;
  }
  __device__ static void anchor(Warp& w, const DeviceTrace& trace, Event kernel, uint64_t cycles, uint64_t timer_ns,
                                int64_t launch) {
    record(w, trace, DeviceRecord::kAnchor, cycles, timer_ns, launch, static_cast<uint32_t>(kernel));
  }
  __device__ static bool has_track(const Warp& w, const DeviceTrace& trace) {
    return trace.records != nullptr && w.block() < trace.blocks && w.warp() < trace.warps;
  }
  __device__ static int64_t track(const Warp& w, const DeviceTrace& trace) {
    return static_cast<int64_t>(w.block()) * trace.warps + w.warp();
  }
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
      : w_(w), trace_(trace), kernel_(kernel) {
    if constexpr (requires { A::kDeviceTracing; }) A::open_track(w_, trace_, launch);
  }
  __device__ ~KernelTrace() {
    if constexpr (requires { A::kDeviceTracing; }) A::close_track(w_, trace_, kernel_);
  }

 private:
  CudaWarp& w_;
  const DeviceTrace& trace_;
  Event kernel_;
};

}  // namespace switchyard::detail

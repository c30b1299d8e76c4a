// SPDX-License-Identifier: Apache-2.0
// The CUDA arch with tracing: the ops are the same, but WarpSpan writes records to device memory. Kernels are compiled for both
// arches, so disabled tracing has no cost.
#pragma once

#include "arch/cuda/cuda_arch.cuh"
#include "trace/device_trace.hpp"
#include "trace/tracer.hpp"

namespace switchyard::detail {

/// One warp's track during a traced kernel, in shared memory. It contains everything that a record needs, so a single load
/// suffices.
struct alignas(16) OpenTrack {
  DeviceRecord* records;    ///< the track's ring buffer; null: this warp has none
  uint32_t size;            ///< loaded asynchronously
  uint16_t multiprocessor;  ///< of this block
  uint16_t log2_capacity;
};

/// A block's start time and launch.
struct BlockBegin {
  uint64_t cycles;
  uint64_t timer_ns;
  int64_t launch;
};

/// Static shared memory that tracing adds to a kernel, including alignment padding.
inline constexpr int64_t kTraceShared = 32 * sizeof(OpenTrack) + 2 * sizeof(OpenTrack);
static_assert(sizeof(BlockBegin) <= 2 * sizeof(OpenTrack));

#if defined(SWITCHYARD_UNTRACED_KERNELS)
/// Compiles every kernel once, without tracing, for scripts/cuda_archs.sh; the resulting objects are never run.
template <class Base>
using TracedArch = Base;
#else
template <class Base>
struct TracedArch : Base {
  using Warp = CudaWarp;
  static constexpr bool kDeviceTracing = true;

  /// Cycle counter of this multiprocessor.
  __device__ static uint64_t ticks() { return static_cast<uint64_t>(clock64()); }

  /// Call in every warp before it records. The track's size is loaded from device memory once; only the first record waits for
  /// it.
  __device__ static void open_track(Warp& w, const DeviceTrace& trace, int64_t launch) {
    if (threadIdx.x % kLanes == 0) {
      OpenTrack& mine = tracks()[w.warp()];
      mine.records = nullptr;
      if (trace.records != nullptr && w.block() < trace.blocks && w.warp() < trace.warps) {
        const int64_t index = index_of(w, trace);
        mine.records = trace.records + index * trace.capacity;
        mine.multiprocessor = static_cast<uint16_t>(ptx::multiprocessor());
        mine.log2_capacity = static_cast<uint16_t>(31 - __clz(static_cast<int>(trace.capacity)));
        ptx::async_copy(&mine.size, &trace.sizes[index]);
        if (w.warp() == 0) *block_begin() = {ticks(), ptx::global_timer(), launch};
      }
    }
    __syncwarp();
  }
  /// Call in every warp after its last record; does not wait for other warps. The first warp of each block records two anchors:
  /// the start of the kernel and the current time, at which other warps may still be running. The host determines the end of
  /// the call (append_device_records).
  __device__ static void close_track(Warp& w, const DeviceTrace& trace, Event kernel) {
    if (threadIdx.x % kLanes != 0 || tracks()[w.warp()].records == nullptr) return;
    if (w.warp() == 0) {
      const BlockBegin begin = *block_begin();
      anchor(kernel, begin.cycles, begin.timer_ns, begin.launch);
      anchor(kernel, ticks(), ptx::global_timer(), begin.launch);
    }
    ptx::async_copies_wait();
    trace.sizes[index_of(w, trace)] = tracks()[w.warp()].size;
  }

  /// Costs one load from shared memory, plus stores whose completion is not awaited.
  __device__ static void record(uint16_t event, uint64_t begin, uint64_t end, int64_t arg, uint32_t bytes) {
    if (threadIdx.x % kLanes == 0) write(event, begin, end, arg, bytes);
    __syncwarp();
  }

 private:
  /// Writes a record. Call from one lane.
  __device__ static __forceinline__ void write(uint16_t event, uint64_t begin, uint64_t end, int64_t arg, uint32_t bytes) {
    OpenTrack& mine = tracks()[threadIdx.x / kLanes];
    ptx::async_copies_wait();
    const OpenTrack now = mine;
    if (now.records == nullptr) return;
    mine.size = now.size + 1;
    const uint32_t place = now.size & ((1u << now.log2_capacity) - 1);
    now.records[place] = {begin, end, arg, event, now.multiprocessor, bytes};
  }
  __device__ static OpenTrack* tracks() {
    __shared__ OpenTrack all[32];
    return all;
  }
  __device__ static BlockBegin* block_begin() {
    __shared__ BlockBegin begin;
    return &begin;
  }
  __device__ static void anchor(Event kernel, uint64_t cycles, uint64_t timer_ns, int64_t launch) {
    write(DeviceRecord::kAnchor, cycles, timer_ns, launch, static_cast<uint32_t>(kernel));
  }
  __device__ static int64_t index_of(const Warp& w, const DeviceTrace& trace) {
    return static_cast<int64_t>(w.block()) * trace.warps + w.warp();
  }
};
#endif

using CudaTraced = TracedArch<Cuda>;
using CudaLanesTraced = TracedArch<CudaLanes>;
using CudaInlineTraced = TracedArch<CudaInline>;

static_assert(Arch<CudaTraced> && Arch<CudaLanesTraced> && Arch<CudaInlineTraced>);

/// Used in kernels of either arch: records the anchors for its records over its lifetime. `kernel` is the launch's role in its
/// call, and `launch` is the value of pack_launch.
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

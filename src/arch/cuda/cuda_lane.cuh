// SPDX-License-Identifier: Apache-2.0
// The arch of a single GPU lane, for the bounded wait (protocol/wait.hpp) in kernels whose warps have no CudaArch.
#pragma once

#include "arch/cuda/ptx.cuh"
#include "arch/ops.hpp"

namespace switchyard::detail {

/// The operations that protocol/wait.hpp needs, each executed by the calling lane alone: no operation synchronizes the warp.
struct CudaLane {
  /// The position of the lane's warp in the launch, and the call's epoch, which such kernels know only on the device.
  class Warp {
   public:
    __device__ __forceinline__ explicit Warp(uint64_t epoch) : epoch_(epoch) {}
    __device__ __forceinline__ uint64_t epoch() const { return epoch_; }
    __device__ __forceinline__ int index() const {
      return static_cast<int>(blockIdx.x * warps_per_block() + (threadIdx.x >> 5));
    }
    __device__ __forceinline__ int total() const { return static_cast<int>(gridDim.x * warps_per_block()); }

   private:
    __device__ static unsigned warps_per_block() { return blockDim.x >> 5; }
    uint64_t epoch_;
  };

  /// A wait for this rank itself is a wait for its other warps, which in turn wait for other ranks.
  static constexpr bool kAwaitsOwnWork = true;

  template <Scope S>
  __device__ __forceinline__ static uint64_t load_acquire(const uint64_t* flag, Site) {
    return ptx::load_acquire<S>(flag);
  }
  template <Scope S>
  __device__ __forceinline__ static void store_release(Warp&, uint64_t* flag, uint64_t value, Site) {
    ptx::store_release<S>(flag, value);
  }
  template <Scope S>
  __device__ __forceinline__ static uint64_t fetch_add(Warp&, uint64_t* counter, uint64_t value, Site) {
    return ptx::add_acq_rel<S>(counter, value);
  }
  __device__ __forceinline__ static void count(Warp&, uint64_t* statistic, uint64_t value) {
    ptx::reduce_add(statistic, value);
  }
  __device__ __forceinline__ static void count_max(Warp&, uint64_t* statistic, uint64_t value) {
    ptx::reduce_max(statistic, value);
  }
  template <class F>
  __device__ __forceinline__ static void for_lanes(Warp&, int64_t n, F&& f) {
    for (int64_t i = 0; i < n; ++i) f(static_cast<int>(i));
  }
  __device__ __forceinline__ static uint64_t now_ns() { return ptx::global_timer(); }
};

}  // namespace switchyard::detail

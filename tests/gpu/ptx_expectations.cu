// SPDX-License-Identifier: Apache-2.0
// One kernel per ordered op, for ptx_expectations.py, which compiles this file and reads the PTX. Never run.
#include "arch/cuda/cuda_traced.cuh"
#include "protocol/call.hpp"

using namespace switchyard::detail;

extern __shared__ __align__(128) std::byte dynamic_shared[];

namespace {

__device__ CudaWarp make_warp() { return CudaWarp(dynamic_shared, CudaShape{1, 1, 16384, 0}); }

}  // namespace

extern "C" __global__ void load_acquire_system(const uint64_t* flag, uint64_t* out) {
  *out = Cuda::load_acquire<Scope::system>(flag, Site::none);
}
extern "C" __global__ void load_acquire_device(const uint64_t* flag, uint64_t* out) {
  *out = Cuda::load_acquire<Scope::device>(flag, Site::none);
}
extern "C" __global__ void store_release_system(uint64_t* flag) {
  CudaWarp w = make_warp();
  Cuda::store_release<Scope::system>(w, flag, 1, Site::none);
}
extern "C" __global__ void publish_system(uint64_t* const* flags, int n) {
  CudaWarp w = make_warp();
  Cuda::publish<Scope::system>(w, flags, n, 1, Site::none);
}
extern "C" __global__ void poll_all_system(const uint64_t* const* flags, int n, int* out) {
  CudaWarp w = make_warp();
  *out = Cuda::poll_all<Scope::system>(w, flags, n, 1, Site::none);
}
extern "C" __global__ void take(uint64_t* counter, uint64_t* out) {
  CudaWarp w = make_warp();
  *out = Cuda::take(w, counter, 1);
}
extern "C" __global__ void post(uint64_t* flag) {
  CudaWarp w = make_warp();
  Cuda::post(w, flag, 1);
}
extern "C" __global__ void peek(const uint64_t* flag, uint64_t* out) { *out = Cuda::peek(flag); }
extern "C" __global__ void publish_entry(uint64_t* const* flags, int n) {
  CudaWarp w = make_warp();
  Cuda::publish_entry(
      w, n,
      [&](int i) {
        return FlagStore{flags[i], 1};
      },
      Site::none);
}
extern "C" __global__ void fetch_add_device(uint64_t* counter, uint64_t* out) {
  CudaWarp w = make_warp();
  *out = Cuda::fetch_add<Scope::device>(w, counter, 1, Site::none);
}
extern "C" __global__ void copy_then_settle_then_release(void* dst, const void* src, uint64_t* flag) {
  CudaWarp w = make_warp();
  Cuda::copy(w, dst, src, 8192);
  Cuda::settle(w);
  Cuda::store_release<Scope::system>(w, flag, 1, Site::none);
}
extern "C" __global__ void copy_then_drain(void* dst, const void* src) {
  CudaWarp w = make_warp();
  Cuda::copy(w, dst, src, 8192);
  Cuda::drain_sources(w);
}

namespace {

template <class A>
__device__ void spanned_copy(const CallContext& call, void* dst, const void* src) {
  CudaWarp w = make_warp();
  const KernelTrace<A> trace(w, call.device_trace, Event::dispatch, pack_launch(call.epoch, dst, 0));
  const WarpSpan<A> span(w, call, Event::send_rows, 1);
  A::copy(w, dst, src, 8192);
  A::settle(w);
}

}  // namespace

extern "C" __global__ void span_not_traced(const __grid_constant__ CallContext call, void* dst, const void* src) {
  spanned_copy<Cuda>(call, dst, src);
}
extern "C" __global__ void span_traced(const __grid_constant__ CallContext call, void* dst, const void* src) {
  spanned_copy<CudaTraced>(call, dst, src);
}

// SPDX-License-Identifier: Apache-2.0
// Kernels that each contain one ordered op, or a few ops whose relative order matters, for ptx_expectations.py, which compiles
// this file and reads the PTX. Each exists for every arch class: name__bulk (Cuda), name__lanes (CudaLanes) and name__inline
// (CudaInline). Never run.
#include "arch/cuda/cuda_traced.cuh"
#include "exchange/low_latency/frame.cuh"
#include "protocol/call.hpp"

using namespace switchyard::detail;
using switchyard::DType;
using switchyard::ScaleKind;

extern __shared__ __align__(128) std::byte dynamic_shared[];

namespace {

constexpr size_t kRowBytes = 4096;  // one stage: settle or drain_sources waits for the stage's load
constexpr int64_t kHidden = 4096;   // 16-bit elements

/// Two stages, so a copy refills one while the other is in flight, and scratch for one row.
__device__ constexpr CudaShape shape() { return CudaShape{1, 2, kRowBytes, 16384}; }

/// Marks the end of the warp's construction: kernel text before the mark does not belong to the op.
__device__ void op_begins() { asm volatile("// op begins" ::: "memory"); }

}  // namespace

#define SWITCHYARD_KERNEL(arch, name, parameters, ...) \
  extern "C" __global__ void name parameters {         \
    using A = arch;                                    \
    CudaWarp w(dynamic_shared, shape());               \
    op_begins();                                       \
    __VA_ARGS__                                        \
  }
#define SWITCHYARD_KERNELS(name, parameters, ...)                      \
  SWITCHYARD_KERNEL(Cuda, name##__bulk, parameters, __VA_ARGS__)       \
  SWITCHYARD_KERNEL(CudaLanes, name##__lanes, parameters, __VA_ARGS__) \
  SWITCHYARD_KERNEL(CudaInline, name##__inline, parameters, __VA_ARGS__)

// --- Flags

SWITCHYARD_KERNELS(load_acquire_system, (const uint64_t* flag, uint64_t* out),
                   *out = A::load_acquire<Scope::system>(flag, Site::none);)
SWITCHYARD_KERNELS(load_acquire_device, (const uint64_t* flag, uint64_t* out),
                   *out = A::load_acquire<Scope::device>(flag, Site::none);)
SWITCHYARD_KERNELS(store_release_system, (uint64_t * flag), A::store_release<Scope::system>(w, flag, 1, Site::none);)
SWITCHYARD_KERNELS(store_release_device, (uint64_t * flag), A::store_release<Scope::device>(w, flag, 1, Site::none);)
SWITCHYARD_KERNELS(publish_to_system, (uint64_t* const* flags, int n),
                   A::publish_to<Scope::system>(
                       w, n,
                       [&](int i) {
                         return FlagStore{flags[i], 1};
                       },
                       Site::none);)
SWITCHYARD_KERNELS(publish_to_device, (uint64_t* const* flags, int n),
                   A::publish_to<Scope::device>(
                       w, n,
                       [&](int i) {
                         return FlagStore{flags[i], 1};
                       },
                       Site::none);)
SWITCHYARD_KERNELS(poll_from_system, (const uint64_t* const* flags, int n, int* out),
                   *out = A::poll_from<Scope::system>(
                       w, n, [&](int i) { return flags[i]; }, 1, Site::none);)
SWITCHYARD_KERNELS(poll_from_device, (const uint64_t* const* flags, int n, int* out),
                   *out = A::poll_from<Scope::device>(
                       w, n, [&](int i) { return flags[i]; }, 1, Site::none);)
SWITCHYARD_KERNELS(fetch_add_system, (uint64_t * counter, uint64_t* out),
                   *out = A::fetch_add<Scope::system>(w, counter, 1, Site::none);)
SWITCHYARD_KERNELS(fetch_add_device, (uint64_t * counter, uint64_t* out),
                   *out = A::fetch_add<Scope::device>(w, counter, 1, Site::none);)
SWITCHYARD_KERNELS(block_sync, (uint64_t * out), out[threadIdx.x] = 1; A::block_sync(w); out[threadIdx.x ^ 32] += 1;)
// Ops without an order.
SWITCHYARD_KERNELS(take, (uint64_t * counter, uint64_t* out), *out = A::take(w, counter, 1);)
SWITCHYARD_KERNELS(post, (uint64_t * flag), A::post(w, flag, 1);)
SWITCHYARD_KERNELS(peek, (const uint64_t* flag, uint64_t* out), *out = A::peek(flag);)
SWITCHYARD_KERNELS(count, (uint64_t * statistic), A::count(w, statistic, 5);)
SWITCHYARD_KERNELS(count_max, (uint64_t * statistic), A::count_max(w, statistic, 5);)
// The frame supplies the fence of publish_entry, as in every low-latency kernel.
SWITCHYARD_KERNELS(publish_entry, (uint64_t* const* flags, int n), fence_entry(w); __syncthreads();
                   if (is_announcer(w)) A::publish_entry(
                       w, n,
                       [&](int i) {
                         return FlagStore{flags[i], 1};
                       },
                       Site::none);)

// --- Moving rows, and the release that covers them

SWITCHYARD_KERNELS(copy_released, (void* dst, const void* src, uint64_t* flag), A::copy(w, dst, src, kRowBytes); A::settle(w);
                   A::store_release<Scope::system>(w, flag, 1, Site::none);)
SWITCHYARD_KERNELS(multicast_to_published, (void* const* dsts, const void* src, uint64_t* const* flags, int n),
                   A::multicast_to(
                       w, n, [&](int i) { return dsts[i]; }, src, kRowBytes);
                   A::settle(w); A::publish_to<Scope::system>(
                       w, n,
                       [&](int i) {
                         return FlagStore{flags[i], 1};
                       },
                       Site::none);)
SWITCHYARD_KERNELS(multicast_fetched_added, (void* const* dsts, const void* src, uint64_t* counter, int n),
                   A::multicast_fetched(
                       w, n, [&](int i) { return dsts[i]; }, A::fetch(w, src, kRowBytes));
                   A::settle(w); A::fetch_add<Scope::device>(w, counter, 1, Site::none);)
SWITCHYARD_KERNELS(fill_zero_released, (void* dst, uint64_t* flag), A::fill_zero(w, dst, kRowBytes); A::settle(w);
                   A::store_release<Scope::system>(w, flag, 1, Site::none);)
SWITCHYARD_KERNELS(for_lanes_released, (int* dst, uint64_t* flag), A::for_lanes(w, 100, [&](int i) { dst[i] = i; });
                   A::settle(w); A::store_release<Scope::system>(w, flag, 1, Site::none);)
SWITCHYARD_KERNELS(reduce_released, (const __grid_constant__ ReduceSpec spec, uint64_t* flag), A::reduce_rows(w, spec);
                   A::settle(w); A::store_release<Scope::system>(w, flag, 1, Site::none);)
SWITCHYARD_KERNELS(reduce_from_released, (void* out, const void* const* rows, const float* weights, uint64_t* flag),
                   const ReduceSpec spec{out, nullptr, nullptr, 0, {nullptr, nullptr}, DType::bf16, kHidden};
                   A::reduce_rows_from(
                       w, spec, 8, true, [&](int i) { return rows[i]; }, [&](int i) { return weights[i]; });
                   A::settle(w); A::store_release<Scope::system>(w, flag, 1, Site::none);)
SWITCHYARD_KERNELS(map_row_released, (void* out, const void* src, uint64_t* flag),
                   A::map_row(w, out, src, DType::bf16, kHidden, AnyRowMap{});
                   A::settle(w); A::store_release<Scope::system>(w, flag, 1, Site::none);)
SWITCHYARD_KERNELS(quantize_to_released, (uint8_t* const* q, void* const* scales, const void* src, int n, uint64_t* flag),
                   A::quantize_to(
                       w, n,
                       [&](int i) {
                         return QuantizedRow{q[i], scales[i]};
                       },
                       src, DType::bf16, kHidden, ScaleKind::f32, 128);
                   A::settle(w); A::store_release<Scope::system>(w, flag, 1, Site::none);)
// A row is quantized into the warp's scratch and copied from there.
SWITCHYARD_KERNELS(quantize_row_copied, (void* dst, const void* src, uint64_t* flag),
                   A::quantize_row(w, reinterpret_cast<uint8_t*>(w.scratch()), w.scratch() + kHidden, src, DType::bf16, kHidden,
                                   ScaleKind::f32);
                   A::copy(w, dst, w.scratch(), kHidden); A::settle(w);
                   A::store_release<Scope::system>(w, flag, 1, Site::none);)
// Scratch is overwritten once it is drained.
SWITCHYARD_KERNELS(copy_drained, (void* dst, std::byte value), A::copy(w, dst, w.scratch(), kRowBytes); A::drain_sources(w);
                   w.scratch()[threadIdx.x] = value;)
SWITCHYARD_KERNELS(source_drained, (void* dst, std::byte* src, std::byte value), A::copy(w, dst, src, kRowBytes);
                   A::drain_sources(w); src[threadIdx.x] = value;)
// The last piece reuses the stage of the first piece.
SWITCHYARD_KERNELS(stage_refilled, (void* dst, const void* src), A::copy(w, dst, src, 3 * kRowBytes); A::settle(w);)
SWITCHYARD_KERNELS(acquired_then_copied, (const uint64_t* flag, void* dst, const void* src),
                   (void)A::load_acquire<Scope::system>(flag, Site::none);
                   A::copy(w, dst, src, kRowBytes); A::settle(w);)
// Written by this warp's lanes, then read by its bulk copy.
SWITCHYARD_KERNELS(written_then_copied, (int* src, void* dst), A::for_lanes(w, 1024, [&](int i) { src[i] = i; }); A::settle(w);
                   A::copy(w, dst, src, kRowBytes); A::settle(w);)

// Sentinel rows: no order except for the words read from the row itself

SWITCHYARD_KERNELS(multicast_sentinel, (void* const* dsts, const void* src, int n),
                   A::multicast_sentinel(
                       w, n, [&](int i) { return dsts[i]; }, src, kRowBytes, sentinel_sums());)
SWITCHYARD_KERNELS(multicast_sentinel_copies, (void* const* dsts, const void* src, int n),
                   A::multicast_sentinel(
                       w, n, [&](int i) { return dsts[i]; }, src, kRowBytes, sentinel_copies());)
SWITCHYARD_KERNELS(reduce_sentinel, (void* out, const void* const* rows),
                   const ReduceSpec spec{out, nullptr, nullptr, 0, {nullptr, nullptr}, DType::bf16, kHidden, true};
                   A::reduce_rows_from(
                       w, spec, 8, false, [&](int i) { return rows[i]; }, AnyWeight{});)
SWITCHYARD_KERNELS(map_row_sentinel, (void* out, const void* src),
                   A::map_row(w, out, src, DType::bf16, kHidden, AnyRowMap{}, true);)
SWITCHYARD_KERNELS(has_arrived, (const void* row, int* payload, int* out),
                   *out = A::has_arrived(w, row, kRowBytes, sentinel_copies()) ? *payload : -1;)
SWITCHYARD_KERNELS(blank_row_released, (void* row, uint64_t* flag), A::blank_row(w, row, kRowBytes, sentinel_copies());
                   A::settle(w); A::store_release<Scope::system>(w, flag, 1, Site::none);)
SWITCHYARD_KERNELS(reduce_if_arrived, (void* out, const void* const* rows, int* result),
                   const ReduceSpec spec{out, nullptr, nullptr, 0, {nullptr, nullptr}, DType::bf16, kHidden};
                   *result = A::reduce_if_arrived(
                       w, spec, 8, false, [&](int i) { return rows[i]; }, AnyWeight{}, 4, sentinel_sums());)

// --- A warp's barriers are ready before the copy engine uses them

extern "C" __global__ void construction() {
  op_begins();
  CudaWarp w(dynamic_shared, shape());
}

// --- Tracing

namespace {

template <class A>
__device__ void spanned_copy(const CallContext& call, void* dst, const void* src) {
  CudaWarp w(dynamic_shared, shape());
  op_begins();
  const KernelTrace<A> trace(w, call.device_trace, Event::dispatch, pack_launch(call.epoch, dst, 0));
  const WarpSpan<A> span(w, call, Event::send_rows, 1);
  A::copy(w, dst, src, kRowBytes);
  A::settle(w);
}

}  // namespace

extern "C" __global__ void span_not_traced(const __grid_constant__ CallContext call, void* dst, const void* src) {
  spanned_copy<Cuda>(call, dst, src);
}
extern "C" __global__ void span_traced(const __grid_constant__ CallContext call, void* dst, const void* src) {
  spanned_copy<CudaTraced>(call, dst, src);
}

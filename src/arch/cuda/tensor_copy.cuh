// SPDX-License-Identifier: Apache-2.0
// Copies of tensor boxes between global and shared memory by the copy engine of sm_90, and helpers for warp-specialized
// kernels: register reallocation between warpgroups, named barriers, and transposing stores of fragments.
//
// Loads signal completion at an mbarrier. bulk_commit() closes a group of stores, for which the issuing thread waits (ptx.cuh).
// Before a copy reads shared memory written by ordinary stores, every writer calls fence_proxy_async_shared(), followed by a
// barrier.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "arch/cuda/ptx.cuh"

namespace switchyard::detail::ptx {

/// Prefetches a map that the calling thread will use soon.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Loads a box whose first element is at {x, y}, {x, y, z}, {x, y, z, u} or {x, y, z, u, v}. Elements outside the tensor are
/// filled with 0 and included in the byte count.
__device__ __forceinline__ void load_box(uint32_t dst, const CUtensorMap* map, uint32_t bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void load_box(uint32_t dst, const CUtensorMap* map, uint32_t bar, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void load_box(uint32_t dst, const CUtensorMap* map, uint32_t bar, int x, int y, int z, int u) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(u)
      : "memory");
}
__device__ __forceinline__ void load_box(uint32_t dst, const CUtensorMap* map, uint32_t bar, int x, int y, int z, int u,
                                         int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
      : "memory");
}
/// Elements outside the tensor are not stored.
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t src, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(src), "r"(x),
               "r"(y)
               : "memory");
}
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t src, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(src),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}
/// Adds to the existing elements in the tensor's type, rounding each result to it.
__device__ __forceinline__ void add_box(const CUtensorMap* map, uint32_t src, int x, int y, int z) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(src), "r"(x), "r"(y), "r"(z)
               : "memory");
}
/// Waits until all but the latest kLeft groups of bulk stores by this thread have read their shared memory.
template <int kLeft>
__device__ __forceinline__ void bulk_wait_read_but() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

/// Waits until all but the latest kLeft groups are complete and visible to this thread; a later release by this thread covers
/// them.
template <int kLeft>
__device__ __forceinline__ void bulk_wait_but() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
}

/// Changes the number of registers per thread to `kRegisters`, which may be lower or higher than before. Call from all threads
/// of a warpgroup.
template <int kRegisters>
__device__ __forceinline__ void dealloc_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void alloc_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Barrier `number` of the block's sixteen, for `threads` threads; barrier 0 is __syncthreads().
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
/// Arrives at a named_barrier() at which other threads wait, without waiting.
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
/// Waits for a phase that a copy or arrivals from this block complete, so nothing outside the block can delay it.
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  while (!mbarrier_try_wait(bar, parity)) {
  }
}

__device__ __forceinline__ int4 load_shared_16(uint32_t p) {
  int4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t p) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(p) : "memory");
  return v;
}
__device__ __forceinline__ float load_shared_float(uint32_t p) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t p, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared_half(uint32_t p, uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(p), "h"(v) : "memory");
}
__device__ __forceinline__ void store_shared_16(uint32_t p, const int4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared_pair(uint32_t p, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(p), "f"(a), "f"(b) : "memory");
}
/// Loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8 and receives two
/// elements of row l / 4 of each matrix.
__device__ __forceinline__ void load_matrices(uint32_t* to, uint32_t p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(p)
               : "memory");
}
/// Stores four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8 and holds two elements
/// of row l / 4 of each matrix.
__device__ __forceinline__ void store_matrices(uint32_t p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(p), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
/// Stores two or four 8 x 8 matrices of 16-bit elements, transposed. Lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_transposed(uint32_t p, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(p), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void store_transposed(uint32_t p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(p), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace switchyard::detail::ptx

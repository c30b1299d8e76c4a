// SPDX-License-Identifier: Apache-2.0
// Thread block clusters, sm_90: the blocks run concurrently, can access each other's shared memory, and can all receive a box
// from a single copy. A block's shared memory remains accessible until its threads arrive at the last cluster_barrier().
#pragma once

#include <cuda.h>

#include <cstdint>

namespace switchyard::detail::ptx {

/// Index of this block within its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Barrier for all threads of all blocks in the cluster; orders all their accesses to shared memory.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// Address, for the functions below, of the memory in block `rank` that corresponds to address `p` in this block's shared
/// memory.
__device__ __forceinline__ uint32_t shared_of_block(uint32_t p, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(p), "r"(rank));
  return there;
}
/// Reads shared memory of any block in the cluster.
__device__ __forceinline__ uint32_t load_of_block(uint32_t there) {
  uint32_t v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(there) : "memory");
  return v;
}
/// Arrives at a barrier in any block, after which the waiting thread may overwrite data that this thread has read. Does not
/// make this thread's writes visible to other blocks; store_async() does that.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint32_t there) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
/// Stores four bytes, counts them at `bar` in the same block, and makes them visible to threads that wait there.
__device__ __forceinline__ void store_async(uint32_t there, uint32_t v, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there), "r"(v), "r"(bar)
               : "memory");
}
/// Copies a box to `dst` in each block whose bit in `blocks` is set, and counts its bytes at `bar` in each of these blocks.
__device__ __forceinline__ void load_box_to_blocks(uint32_t dst, const CUtensorMap* map, uint32_t bar, int x, int y,
                                                   uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void load_box_to_blocks(uint32_t dst, const CUtensorMap* map, uint32_t bar, int x, int y, int z,
                                                   int u, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(u), "h"(blocks)
      : "memory");
}

}  // namespace switchyard::detail::ptx

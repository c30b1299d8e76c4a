// SPDX-License-Identifier: Apache-2.0
// A grid of one cluster, whose blocks can read each other's shared memory. Before compute capability 9.0, where GPUs have no
// clusters, it is a grid of one block. The grid must be launched with one_cluster_blocks(generation of the GPU, n) blocks.
#pragma once

#include "arch/cuda/cluster.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define SWITCHYARD_ONE_CLUSTER(blocks)
#else
/// Attribute for a kernel of up to `blocks` blocks.
#define SWITCHYARD_ONE_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#endif

namespace switchyard::detail {

/// `generation`: major version of the compute capability.
inline int one_cluster_blocks(int generation, int blocks) { return generation >= 9 ? blocks : 1; }

namespace ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
__device__ __forceinline__ uint32_t block_of_one_cluster() { return 0; }
__device__ __forceinline__ void one_cluster_barrier() { __syncthreads(); }
__device__ __forceinline__ uint32_t load_of_one_cluster(const uint32_t* mine, uint32_t) { return *mine; }
#else
/// Index of this block.
__device__ __forceinline__ uint32_t block_of_one_cluster() { return cluster_rank(); }
/// Barrier for all threads of all blocks; orders all their accesses to shared memory.
__device__ __forceinline__ void one_cluster_barrier() { cluster_barrier(); }
/// Value in block `block` of the shared-memory word that corresponds to `mine` in this block.
__device__ __forceinline__ uint32_t load_of_one_cluster(const uint32_t* mine, uint32_t block) {
  return load_of_block(shared_of_block(static_cast<uint32_t>(__cvta_generic_to_shared(mine)), block));
}
#endif

}  // namespace ptx
}  // namespace switchyard::detail

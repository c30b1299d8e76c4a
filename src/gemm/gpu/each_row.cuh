// SPDX-License-Identifier: Apache-2.0
// The rows of all experts, distributed over the threads of a grid.
#pragma once

#include "gemm/gpu/tile_roles.cuh"

namespace switchyard::detail::gemm {

/// Calls `work(row)` for every row of an expert, in all threads of one of the grid's teams. A block of `kBlock` threads has
/// teams of `kTeam` consecutive threads, to which the rows are assigned round-robin. Call from all threads.
template <int kBlock, int kTeam, class Work>
__device__ __forceinline__ void for_each_row_of(const RowRanges& ranges, int num_experts, Work work) {
  __shared__ int2 experts[kMaxExperts];  // first row, rows
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kBlock)
    experts[e] = {static_cast<int>(first_row_of(ranges, e)), static_cast<int>(rows_of(ranges, e))};
  __syncthreads();
  const uint32_t teams = gridDim.x * (kBlock / kTeam);
  uint32_t at = threadIdx.x / kTeam * gridDim.x + blockIdx.x;  // spreads few rows over all multiprocessors
  for (int e = 0; e < num_experts; ++e) {
    const int2 expert = experts[e];
    const auto rows = static_cast<uint32_t>(expert.y);
    for (; at < rows; at += teams) work(static_cast<int64_t>(expert.x) + at);
    at -= rows;
  }
}

}  // namespace switchyard::detail::gemm

// SPDX-License-Identifier: Apache-2.0
// What the host passes to the kernels of the CUDA bench (kernels.cuh).
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/cuda/cuda_warp.cuh"
#include "protocol/dispatch_direct.hpp"

namespace switchyard::cuda_bench {

using detail::CudaShape;
using detail::DispatchParams;

inline constexpr int kMaxWarps = 14;  ///< per block, of every kernel that moves rows
/// Dynamic shared memory of a block on sm_90, barriers included.
inline constexpr uint32_t kSharedLimit = 227 * 1024;

/// Flags of the harness's own barrier: one line per rank in every segment.
struct BarrierParams {
  uint64_t* theirs[kMaxRanks];      ///< my line at rank r
  const uint64_t* mine[kMaxRanks];  ///< rank r's line here
  int world;
  uint64_t timeout_ns;
  detail::FaultRecord* fault;
};

/// Rows from `src` to places known beforehand.
struct FloorParams {
  const std::byte* src;
  int64_t tokens;
  uint32_t row_bytes;
  int stages;  ///< 1 or 2
  // push_routing: destinations of token t are to[begin[t]] .. to[begin[t + 1] - 1].
  const int64_t* begin;
  std::byte* const* to;
  // push_all: every token goes to row `first_row + t` of all ranks, starting with the next one.
  std::byte* base[kMaxRanks];
  int64_t first_row;
  int rank;
  int world;
};

inline constexpr int64_t kZeroRow = -1;  ///< expectation: a padding row of zeros

struct Mismatches {
  unsigned long long words;
  unsigned long long first_row;  ///< of any wrong row; not necessarily the smallest
};

}  // namespace switchyard::cuda_bench

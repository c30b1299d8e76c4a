// SPDX-License-Identifier: Apache-2.0
// Copies a dispatch's rows to the caller's memory if the dispatch did not copy them as they arrived. Only the device knows
// which rows have arrived, so the kernel determines the rows to copy; the host need not wait, and the copy can be captured.
#include "exchange/normal/launch.hpp"

namespace switchyard::detail {

namespace normal {

constexpr int kCopyThreads = 512;
/// Number of words in flight per thread; a copy by few multiprocessors would otherwise be latency-bound.
constexpr int kCopyWords = 8;

/// Copies `words` 16-byte words. Call from all threads of the grid.
__device__ void copy_words(const uint4* from, uint4* to, int64_t words) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kCopyThreads;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kCopyThreads + threadIdx.x;
  for (; i + (kCopyWords - 1) * threads < words; i += kCopyWords * threads) {
    uint4 held[kCopyWords];
#pragma unroll
    for (int k = 0; k < kCopyWords; ++k) held[k] = from[i + k * threads];
#pragma unroll
    for (int k = 0; k < kCopyWords; ++k) to[i + k * threads] = held[k];
  }
  for (; i < words; i += threads) to[i] = from[i];
}

__global__ void __launch_bounds__(kCopyThreads) copy_out_kernel(const __grid_constant__ CopyOut p) {
  if (p.header == nullptr || p.header->moved == 0) return;
  const int64_t rows = p.header->rows;
  copy_words(reinterpret_cast<const uint4*>(p.rows), reinterpret_cast<uint4*>(p.to_rows), rows * p.row_bytes / 16);
  copy_words(reinterpret_cast<const uint4*>(p.scales), reinterpret_cast<uint4*>(p.to_scales), rows * p.scale_bytes / 16);
  if (blockIdx.x == 0 && threadIdx.x == 0) p.moved->copied_bytes += static_cast<uint64_t>(rows * (p.row_bytes + p.scale_bytes));
}

}  // namespace normal

namespace {

const Kernel<const CopyOut> copy_out("copy of rows", normal::copy_out_kernel, normal::kCopyThreads,
                                     [](const DeviceLimits&) { return 0; });

}  // namespace

void launch_copy_out(const CopyOut& p, int blocks, gpu::Stream stream) {
  copy_out.launch({blocks, normal::kCopyThreads, 0}, stream, p);
}

}  // namespace switchyard::detail

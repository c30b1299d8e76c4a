// SPDX-License-Identifier: Apache-2.0
// Kernels for the GPU exchange object tests. All functions enqueue and return; every kernel terminates on its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace harness {

/// Up to kMax copies of whole words, made by one kernel instead of the copy engine, which may wait for other ranks' kernels.
struct CopyList {
  static constexpr int kMax = 12;
  uint32_t* to[kMax];
  const uint32_t* from[kMax];
  uint64_t words[kMax];
  int n = 0;
  /// `bytes` is rounded up to words. Adds no entry if it is 0.
  void add(void* destination, const void* source, size_t bytes);
};
void launch_copies(const CopyList& list, cudaStream_t stream);
void launch_copy(void* to, const void* from, size_t bytes, cudaStream_t stream);
/// Holds the stream until `*opened` (mapped host memory) is not 0, but for at most `limit_ns`; a timeout sets `*timed_out` to
/// 1.
void launch_gate(const uint32_t* opened, uint32_t* timed_out, uint64_t limit_ns, cudaStream_t stream);
/// Runs multiplications for `ns` in each of its blocks.
void launch_busy(int blocks, int threads, uint64_t ns, float* sink, cudaStream_t stream);
void launch_set(int32_t* to, int32_t value, cudaStream_t stream);

}  // namespace harness

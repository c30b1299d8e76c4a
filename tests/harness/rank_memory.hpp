// SPDX-License-Identifier: Apache-2.0
// Memory of a rank in its backend, so suites are written once for host memory and device pointers.
#pragma once

#include <cstddef>

#include "switchyard/group.hpp"

namespace harness {

/// All operations are ordered on stream(), which also runs the rank's calls. For use by one thread.
class RankMemory {
 public:
  virtual ~RankMemory() = default;
  virtual bool on_device() const = 0;
  virtual void* stream() const = 0;  ///< cudaStream_t, non-blocking; null on the host
  /// Copies `bytes` bytes at `host` (null or 0 bytes: null). The copy is valid until release().
  virtual void* give(const void* host, size_t bytes) = 0;
  /// Returns memory for results, initialized with the content of `host`, valid until release(). On the host it is `host`
  /// itself.
  virtual void* lend(void* host, size_t bytes) = 0;
  /// Returns `bytes` bytes, poisoned, aligned to 256, valid until the next call of keep(), also across release().
  virtual void* keep(size_t bytes) = 0;
  virtual void write(void* to, const void* host, size_t bytes) = 0;
  /// Waits for the calls so far.
  virtual void read(void* host, const void* from, size_t bytes) = 0;
  virtual void fill(void* at, int byte, size_t bytes) = 0;
  /// In stream order, overwrites and frees all inputs, which reveals calls that still read them.
  virtual void release() = 0;
};

/// Returns the memory of this rank for the calling thread: host memory or memory of the rank's GPU, depending on the library
/// with which a suite is linked.
RankMemory& rank_memory(const switchyard::Group& group);

/// Visible GPUs; 0 without a driver. CUDA suites only.
int count_gpus();
/// The number determined by main() in another process, so this process can still fork ranks that use GPUs. CUDA suites only.
int gpus_of_suite();

}  // namespace harness

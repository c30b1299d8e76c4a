// SPDX-License-Identifier: Apache-2.0
// A rank's memory in its backend, which lets a suite be written once for host memory and device pointers.
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
  /// Copies `bytes` bytes from `host`; returns null if `host` is null or `bytes` is 0. The copy is valid until release().
  virtual void* give(const void* host, size_t bytes) = 0;
  /// Returns memory for results, initialized with the content of `host`, valid until release(). On the host, this is `host`
  /// itself.
  virtual void* lend(void* host, size_t bytes) = 0;
  /// Returns `bytes` poisoned bytes, aligned to 256 and valid until the next call to keep(), even across release().
  virtual void* keep(size_t bytes) = 0;
  virtual void write(void* to, const void* host, size_t bytes) = 0;
  /// Waits for all calls made so far.
  virtual void read(void* host, const void* from, size_t bytes) = 0;
  virtual void fill(void* at, int byte, size_t bytes) = 0;
  /// In stream order, overwrites and frees all inputs, which reveals calls that still read them.
  virtual void release() = 0;
};

/// Returns this rank's memory for the calling thread: host memory or memory of its GPU, depending on the library that the suite
/// is linked with.
RankMemory& rank_memory(const switchyard::Group& group);

/// Number of visible GPUs; 0 without a driver. CUDA suites only.
int count_gpus();
/// Number of GPUs, determined by main() in another process so that this process can still fork ranks that use GPUs. CUDA suites
/// only.
int gpus_of_suite();

}  // namespace harness

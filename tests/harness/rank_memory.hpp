// SPDX-License-Identifier: Apache-2.0
// A rank's memory as its backend sees it, so that a suite is written once for host memory and for device pointers.
#pragma once

#include <cstddef>

#include "switchyard/group.hpp"

namespace harness {

/// All operations are ordered on stream(), on which the rank's calls run too. One thread.
class RankMemory {
 public:
  virtual ~RankMemory() = default;
  virtual bool on_device() const = 0;
  virtual void* stream() const = 0;  ///< cudaStream_t, non-blocking; on the host null
  /// A copy of `bytes` at `host` (null or 0 bytes: null), valid until release().
  virtual void* give(const void* host, size_t bytes) = 0;
  /// Room for results that holds what `host` does, valid until release(). On the host it is that memory itself.
  virtual void* lend(void* host, size_t bytes) = 0;
  /// Room for `bytes`, poisoned, aligned to 256; valid until the next call of this, whatever is released.
  virtual void* keep(size_t bytes) = 0;
  virtual void write(void* to, const void* host, size_t bytes) = 0;
  /// Waits for the calls so far.
  virtual void read(void* host, const void* from, size_t bytes) = 0;
  virtual void fill(void* at, int byte, size_t bytes) = 0;
  /// Overwrites all that was given, in order, and frees it: a call that still reads it shows.
  virtual void release() = 0;
};

/// Of this rank, for the calling thread. The library that a suite is linked with says where: in host memory, or on the rank's
/// GPU.
RankMemory& rank_memory(const switchyard::Group& group);

/// Visible GPUs; 0 without a driver. CUDA suites only.
int count_gpus();
/// As main() found them in another process: this one may still fork ranks that use them. CUDA suites only.
int gpus_of_suite();

}  // namespace harness

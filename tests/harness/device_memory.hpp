// SPDX-License-Identifier: Apache-2.0
// Lets a suite written for host memory run on a group whose pointers are device pointers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace harness {

/// One rank's access to its device. All operations are ordered on stream(), on which the rank's calls run too. One thread.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual void begin() = 0;          ///< makes the device current for the calling thread
  virtual void* stream() const = 0;  ///< cudaStream_t, non-blocking
  /// Device copy of `bytes` at `host` (null or 0 bytes: null), valid until release().
  virtual void* upload(const void* host, size_t bytes) = 0;
  virtual void write(void* device, const void* host, size_t bytes) = 0;
  /// Waits for the calls so far.
  virtual void read(void* host, const void* device, size_t bytes) = 0;
  virtual void fill(void* device, int byte, size_t bytes) = 0;
  /// Frees all uploads.
  virtual void release() = 0;
};

/// Of rank `rank` on GPU `device` (-1: as GroupOptions::device), for the calling thread; defined by the suites that are linked
/// with CUDA.
DeviceMemory& device_memory(int rank, int device);
/// Visible GPUs; 0 without a driver.
int count_gpus();
/// The same as main() found it in another process: this one may still fork ranks that use them.
int gpus_of_suite();

}  // namespace harness

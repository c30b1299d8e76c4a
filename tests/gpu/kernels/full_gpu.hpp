// SPDX-License-Identifier: Apache-2.0
// A kernel that needs every multiprocessor of a GPU at once, a kernel that holds multiprocessors until it is released, and a
// wait with a deadline until a stream is idle.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>

#include "gpu/harness/object_rig.hpp"

namespace harness {

/// Waits until `stream` is idle or `limit` has passed. Returns whether it is idle.
bool idle_within(cudaStream_t stream, std::chrono::milliseconds limit);

/// For one station. Must be constructed while no rank waits for another.
class FullGpu {
 public:
  explicit FullGpu(Station& me);
  /// Runs a block that uses all shared memory on every multiprocessor. The blocks end when all of them have begun, or after two
  /// seconds. The latter counts as a failure, because other work held a multiprocessor. Call while no other work on this GPU
  /// can be awaited.
  void expect_free(const std::string& what);

 private:
  Station& me_;
  uint32_t* words_;  ///< blocks that have begun, and blocks that gave up
  int blocks_ = 0, shared_bytes_ = 0;
  uint32_t launches_ = 0;
};

/// Holds whole multiprocessors of a station's GPU by running, on the station's second stream, a block on each that uses all its
/// shared memory. Must be constructed while no rank waits for another.
class HeldMultiprocessors {
 public:
  HeldMultiprocessors(Station& me, int multiprocessors);
  /// Returns when all blocks have arrived. They remain until release(), but for at most `limit`.
  void hold(std::chrono::milliseconds limit);
  /// Whether no block has timed out since hold().
  bool holding() const { return *static_cast<volatile uint32_t*>(words_.gave_up) == 0; }
  void release() { *static_cast<volatile uint32_t*>(words_.opened) = 1; }

  struct Words {
    uint32_t *opened, *begun, *gave_up;  ///< mapped host memory
  };

 private:
  void launch(std::chrono::milliseconds limit);

  Station& me_;
  int blocks_, shared_bytes_ = 0;
  Words words_{};
};

}  // namespace harness

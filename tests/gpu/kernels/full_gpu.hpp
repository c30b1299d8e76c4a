// SPDX-License-Identifier: Apache-2.0
// A kernel that needs every multiprocessor of a GPU at the same time, and a stream's end with a deadline.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>

#include "gpu/harness/object_rig.hpp"

namespace harness {

/// Waits until `stream` is idle, or `limit` is over. True: it is.
bool idle_within(cudaStream_t stream, std::chrono::milliseconds limit);

/// For one station. Constructed while no rank waits for another.
class FullGpu {
 public:
  explicit FullGpu(Station& me);
  /// Runs a block of all shared memory on every multiprocessor. Each ends when all of them have begun, or after two seconds,
  /// which is a failure: something else held a multiprocessor. While nothing else that runs on this GPU may be waited for.
  void expect_free(const std::string& what);

 private:
  Station& me_;
  uint32_t* words_;  ///< blocks that have begun, and blocks that gave up
  int blocks_ = 0, shared_bytes_ = 0;
  uint32_t launches_ = 0;
};

}  // namespace harness

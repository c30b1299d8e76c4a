// SPDX-License-Identifier: Apache-2.0
// Calls of one exchange object on a GPU: in which order they run, and what the last one moved.
#pragma once

#include <cuda_runtime_api.h>

#include "exchange/cuda/cuda_rank.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::detail {

/// All members: with the rank's GPU current.
class CallOrder {
 public:
  /// Waits for the rank's copy stream.
  explicit CallOrder(CudaRank& gpu);
  CallOrder(const CallOrder&) = delete;
  CallOrder& operator=(const CallOrder&) = delete;
  /// Waits for the last call that was not captured. Never throws.
  ~CallOrder();

  /// Before a call's first launch: orders `stream` after the last call. A captured call is ordered by the user of its graph.
  /// \returns the graph, or null if the stream is not captured.
  cudaGraph_t begin(cudaStream_t stream);
  /// After its last launch, of so many warps.
  void end(cudaStream_t stream, bool captured, int warps);

  /// Waits for the last call that was not captured.
  void wait() const;
  /// For CallContext.
  MoveCounter* moved() const { return moved_.as<MoveCounter>(); }
  /// What the last call moved. Waits for it, if it was not captured.
  CallStatistics statistics() const;

 private:
  CudaRank& gpu_;
  DeviceMemory moved_;
  cudaEvent_t done_ = nullptr;  // after the last call that was not captured
  unsigned long long last_stream_ = 0;
  bool called_ = false;
  int last_warps_ = 0;
};

}  // namespace switchyard::detail

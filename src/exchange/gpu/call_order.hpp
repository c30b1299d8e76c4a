// SPDX-License-Identifier: Apache-2.0
// Calls of one exchange object on a GPU: in which order they run, and what the last one moved.
#pragma once

#include "arch/gpu_runtime.hpp"
#include "exchange/gpu/rank.hpp"
#include "arch/gpu_order.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

/// The stream of a call.
struct CallStream {
  gpu::Stream stream = nullptr;
  CaptureState capture;       ///< of the stream when the call began
  unsigned long long id = 0;  ///< of a stream that is not captured
};

/// All members: with the rank's GPU current.
class CallOrder {
 public:
  /// Waits for the rank's copy stream. `object`: its number and its name, which ends with the program, for
  /// CudaRank::raise_invalid_ids.
  CallOrder(CudaRank& gpu, const char* object, uint64_t number, InvalidIds invalid_ids);
  CallOrder(const CallOrder&) = delete;
  CallOrder& operator=(const CallOrder&) = delete;
  ~CallOrder();

  /// Before a call's first launch: orders `stream` after the last call. A captured call is ordered by the user of its graph.
  CallStream begin(gpu::Stream stream);
  /// Call after the call's last launch, which has `warps` warps.
  void end(const CallStream& call, int warps);

  /// Waits for the last call that was not captured.
  void wait() const;
  /// All calls so far, and graphs that hold calls: what the object's memory ends after.
  MemoryUses uses() const;
  /// The end of the last call that was not captured, or null.
  const Point& last() const { return last_; }
  /// Sets what the object's calls count in.
  void give_counters(CallContext& call) const;
  /// Invalid ids of the calls that have run. Waits for the copy stream.
  int64_t invalid_ids() const;
  /// What the last call moved. Waits for it, if it was not captured.
  CallStatistics statistics() const;

 private:
  CudaRank& gpu_;
  DeviceMemory moved_;  ///< counters of warps, then InvalidIdCounts
  const InvalidIds policy_;
  CountedIds counted_;
  Point last_;
  int last_warps_ = 0;
  const Holds graphs_ = std::make_shared<std::atomic<int>>(0);  ///< that hold calls of the object
  unsigned long long last_capture_ = 0;
  static constexpr unsigned long long kNoStream = ~0ull;
  unsigned long long checked_stream_ = kNoStream;  ///< the last stream that was found to be one of this GPU
  unsigned long long legacy_id_ = kNoStream;       ///< of the default stream, once it was used
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Ordering of one exchange object's calls on a GPU, and statistics of its last call.
#pragma once

#include "arch/gpu_runtime.hpp"
#include "exchange/gpu/rank.hpp"
#include "arch/gpu_order.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

struct CallStream {
  gpu::Stream stream = nullptr;
  CaptureState capture;       ///< state of the stream when the call began
  unsigned long long id = 0;  ///< of a stream that is not captured
};

/// All members require the rank's GPU to be current.
class CallOrder {
 public:
  /// Waits for the rank's copy stream. `object`: name used by CudaRank::raise_invalid_ids, with static lifetime; `number`: the
  /// object's number.
  CallOrder(CudaRank& gpu, const char* object, uint64_t number, InvalidIds invalid_ids);
  CallOrder(const CallOrder&) = delete;
  CallOrder& operator=(const CallOrder&) = delete;
  ~CallOrder();

  /// Call before a call's first launch; orders `stream` after the previous call. The order of captured calls is up to the user
  /// of their graph.
  CallStream begin(gpu::Stream stream);
  /// Call after the call's last launch, which has `warps` warps.
  void end(const CallStream& call, int warps);

  /// Waits for the last call that was not captured.
  void wait() const;
  /// Returns the memory uses by all calls so far and by all graphs that contain calls. The object's memory must not be freed
  /// before these uses are over.
  MemoryUses uses() const;
  /// End point of the last call that was not captured, or null.
  const Point& last() const { return last_; }
  /// Sets the object's counters in `call`.
  void set_counters(CallContext& call) const;
  /// Number of invalid ids in the calls that have run so far. Waits for the copy stream.
  int64_t invalid_ids() const;
  /// Waits for the last call unless it was captured.
  CallStatistics statistics() const;

 private:
  CudaRank& gpu_;
  DeviceMemory moved_;  ///< counters of warps, then InvalidIdCounts
  const InvalidIds policy_;
  CountedIds counted_;
  Point last_;
  int last_warps_ = 0;
  const HoldCounter graphs_ = std::make_shared<std::atomic<int>>(0);  ///< graphs that contain calls of the object
  unsigned long long last_capture_ = 0;
  static constexpr unsigned long long kNoStream = ~0ull;
  unsigned long long checked_stream_ = kNoStream;  ///< the last stream that was verified to belong to this GPU
  unsigned long long legacy_id_ = kNoStream;       ///< of the default stream, once it was used
};

}  // namespace switchyard::detail

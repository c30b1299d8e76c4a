// SPDX-License-Identifier: Apache-2.0
// The clock and memory of one rank, on the host or on a GPU. Both use the same timed code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device/rank_device.hpp"
#include "measure/gpu/gpu_rank.hpp"
#include "switchyard/group.hpp"

namespace switchyard::tool {

/// How a GPU's clock times calls. In both cases, the L2 cache is filled with unrelated lines before each call.
enum class Timing {
  enqueued,  ///< from CUDA event to CUDA event around each call
  replayed,  ///< the call is part of a replayed graph and is timed inside the graph
};

/// Seconds of a limit, by block shape: the times of bare kernels that move the rows of a routing. Empty on the host.
using LimitTimes = std::vector<std::vector<double>>;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual RankDevice& device() = 0;
  /// Collective. Seconds of one run of `call`, started after all ranks have met.
  virtual double once(const std::function<void()>& call) = 0;
  /// Collective. Seconds for each of `n` runs of `call`, after `warmup` additional runs. All ranks meet before each.
  virtual std::vector<double> time(const std::function<void()>& call, int64_t warmup, int64_t n) = 0;
  /// Collective. Seconds of the first kernel of `call` alone, which `call` must enqueue first. Empty on the host.
  virtual std::vector<double> time_first_kernel(const std::function<void()>&, int64_t, int64_t) { return {}; }
  /// All ranks meet; on a GPU, in stream order.
  virtual void meet() = 0;
  /// Idles for the given time, either on the rank's own thread or as enqueued work.
  virtual void idle(double microseconds) = 0;
  /// Computation that takes about the given time when nothing else runs, either on the rank's own thread or enqueued on all
  /// multiprocessors of the rank.
  virtual void compute(double microseconds) = 0;
  /// Collective. Times of bare kernels on `sms` multiprocessors: they write each token's row to all its destinations, or they
  /// read and sum rows (bf16) from those destinations.
  virtual LimitTimes push_limits(size_t, int, int64_t, int64_t) { return {}; }
  virtual LimitTimes pull_limits(size_t, int, int64_t, int64_t) { return {}; }
  /// Collective. Seconds of a meeting of all ranks' GPUs, like the meeting that ends these kernels. Empty on the host.
  virtual std::vector<double> meeting_limit(int64_t, int64_t) { return {}; }
  /// Collective. Seconds taken by `sms` multiprocessors to quantize the given number of bf16 rows of `hidden` columns, which
  /// are kept in shared memory. Empty on the host.
  virtual std::vector<double> quantize_limit(int64_t, int64_t, int, int64_t, int64_t) { return {}; }
};

/// Maximum of --late-us.
inline constexpr int64_t kMaxLateUs = 100'000;
/// clock.time() for calls that rank 0 enters `late_us` after the others, measured from rank 0's entry. `self`: this rank.
std::vector<double> time_entered_late(Clock& clock, int self, int64_t late_us, const std::function<void()>& call,
                                      int64_t warmup, int64_t n);

/// Rows that a GPU's clock moves to measure limits.
struct LimitRows {
  const measure::RowMoves* pushed = nullptr;  ///< by this rank; null: the clock has no limits
  const measure::RowMoves* pulled = nullptr;  ///< null: the rows of `pushed`
  int64_t tokens = 0;                         ///< on this rank
  size_t bytes = 0;                           ///< maximum that any rank receives
};

std::unique_ptr<Clock> make_host_clock(Group& group);
/// Collective, GPUs only. Takes gpu_clock_bytes(rows.bytes) of each rank's heap. \throws UsageError if this build has no CUDA
/// code
std::unique_ptr<Clock> make_gpu_clock(Group& group, Timing timing, const LimitRows& rows);
/// Symmetric memory of the clock. \throws UsageError if this build has no CUDA code
size_t gpu_clock_bytes(size_t limit_bytes);

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// One rank's clock and memory: of the host, or of a GPU. What is timed is written once for both.
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

/// How a GPU's clock times calls. The L2 cache is filled with other lines before each call either way.
enum class Timing {
  enqueued,  ///< from CUDA event to CUDA event around each call
  replayed,  ///< the call is a part of a graph that is replayed, timed inside the graph
};

/// Seconds of a limit by block shape: rows of a routing that bare kernels move. Empty on the host.
using LimitTimes = std::vector<std::vector<double>>;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual RankDevice& device() = 0;
  /// Collective. Seconds of `call`, once, after all ranks have met.
  virtual double once(const std::function<void()>& call) = 0;
  /// Collective. Seconds of `call`, `n` times after `warmup` more. Before each all ranks meet.
  virtual std::vector<double> time(const std::function<void()>& call, int64_t warmup, int64_t n) = 0;
  /// Collective. Seconds of the first kernel of `call` alone, which must be the first thing that `call` enqueues. Empty on the
  /// host.
  virtual std::vector<double> time_first_kernel(const std::function<void()>&, int64_t, int64_t) { return {}; }
  /// All ranks meet, on a GPU in the order of its stream.
  virtual void meet() = 0;
  /// Nothing for so long: on the rank's own thread, or enqueued.
  virtual void idle(double microseconds) = 0;
  /// Arithmetic that takes about so long by itself: the rank's own thread does it, or it is enqueued for all multiprocessors
  /// of the rank.
  virtual void compute(double microseconds) = 0;
  /// Collective. Times of bare kernels on `sms` multiprocessors that write each token's row to all its places, or that sum
  /// rows from there (bf16).
  virtual LimitTimes push_limits(size_t, int, int64_t, int64_t) { return {}; }
  virtual LimitTimes pull_limits(size_t, int, int64_t, int64_t) { return {}; }
  /// Collective. Seconds in which all ranks' GPUs meet, as at the end of these kernels. Empty on the host.
  virtual std::vector<double> meeting_limit(int64_t, int64_t) { return {}; }
  /// Collective. Seconds in which `sms` multiprocessors quantise so many bf16 rows of `hidden` columns, which stay in shared
  /// memory. Empty on the host.
  virtual std::vector<double> quantize_limit(int64_t, int64_t, int, int64_t, int64_t) { return {}; }
};

/// Most of --late-us.
inline constexpr int64_t kMaxLateUs = 100'000;
/// clock.time() of calls that rank 0 enters `late_us` after the others, counted from when it does. `self`: this rank.
std::vector<double> time_entered_late(Clock& clock, int self, int64_t late_us, const std::function<void()>& call,
                                      int64_t warmup, int64_t n);

/// What the limits of a GPU's clock move.
struct LimitRows {
  const measure::RowMoves* pushed = nullptr;  ///< of this rank; null: the clock has no limits
  const measure::RowMoves* pulled = nullptr;  ///< null: what push sends
  int64_t tokens = 0;                         ///< of this rank
  size_t bytes = 0;                           ///< most that any rank receives
};

std::unique_ptr<Clock> make_host_clock(Group& group);
/// Collective. Only on GPUs, and with gpu_clock_bytes(rows.bytes) of each rank's heap. \throws UsageError without CUDA code in
/// this build
std::unique_ptr<Clock> make_gpu_clock(Group& group, Timing timing, const LimitRows& rows);
/// Symmetric memory that it takes. \throws UsageError without CUDA code in this build
size_t gpu_clock_bytes(size_t limit_bytes);

}  // namespace switchyard::tool

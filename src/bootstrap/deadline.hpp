// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace switchyard::detail {

using Milliseconds = std::chrono::milliseconds;

/// Delay before a peer's departure is reported, so that another rank's death can be reported as its cause.
inline constexpr Milliseconds kExplanationTime{250};

/// Limits durations, including milliseconds::max(), to ten years, so that no sum or conversion overflows.
inline Milliseconds bounded(Milliseconds duration) noexcept {
  constexpr Milliseconds kLongest = std::chrono::hours{24 * 3650};
  return std::clamp(duration, Milliseconds{0}, kLongest);
}
/// Value for CallContext::timeout_ns.
inline uint64_t bounded_ns(Milliseconds duration) noexcept {
  return static_cast<uint64_t>(std::chrono::nanoseconds(bounded(duration)).count());
}

/// A point in time, shared by several steps: now plus a duration limited by bounded().
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(Milliseconds budget) : budget_(bounded(budget)), end_(Clock::now() + budget_) {}

  Milliseconds budget() const noexcept { return budget_; }
  Clock::time_point time() const noexcept { return end_; }
  bool passed() const noexcept { return Clock::now() >= end_; }
  /// Next poll time for a wait that also depends on other conditions: the end of the deadline, but at most a few milliseconds
  /// from now.
  Clock::time_point next_look() const noexcept { return std::min(end_, Clock::now() + Milliseconds{10}); }
  /// The remaining time, rounded up so that a wait of this duration never ends before the deadline.
  Milliseconds remaining() const noexcept {
    return std::max(Milliseconds{0}, std::chrono::ceil<Milliseconds>(end_ - Clock::now()));
  }
  /// Timeout for poll(2): remaining(), limited to `at_most`.
  int poll_ms(int at_most = 3'600'000) const noexcept {
    return static_cast<int>(std::min<Milliseconds::rep>(remaining().count(), at_most));
  }

 private:
  Milliseconds budget_;
  Clock::time_point end_;
};

}  // namespace switchyard::detail

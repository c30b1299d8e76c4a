// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace switchyard::detail {

using Milliseconds = std::chrono::milliseconds;

/// How long the departure of a peer waits for the news of another's end that explains it.
inline constexpr Milliseconds kExplanationTime{250};

/// Durations beyond ten years, milliseconds::max() among them, count as ten years: no sum or conversion overflows.
inline Milliseconds bounded(Milliseconds duration) noexcept {
  constexpr Milliseconds kLongest = std::chrono::hours{24 * 3650};
  return std::clamp(duration, Milliseconds{0}, kLongest);
}
/// For CallContext::timeout_ns.
inline uint64_t bounded_ns(Milliseconds duration) noexcept {
  return static_cast<uint64_t>(std::chrono::nanoseconds(bounded(duration)).count());
}

/// A point in time that several steps share, bounded() from now.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(Milliseconds budget) : budget_(bounded(budget)), end_(Clock::now() + budget_) {}

  Milliseconds budget() const noexcept { return budget_; }
  Clock::time_point time() const noexcept { return end_; }
  bool passed() const noexcept { return Clock::now() >= end_; }
  /// For a wait that something else than its condition may end: time(), but at most some milliseconds from now.
  Clock::time_point next_look() const noexcept { return std::min(end_, Clock::now() + Milliseconds{10}); }
  /// Rounded up, so that a wait for this long ends at or after the deadline.
  Milliseconds remaining() const noexcept {
    return std::max(Milliseconds{0}, std::chrono::ceil<Milliseconds>(end_ - Clock::now()));
  }
  /// For poll(2): remaining(), but at most `at_most`.
  int poll_ms(int at_most = 3'600'000) const noexcept {
    return static_cast<int>(std::min<Milliseconds::rep>(remaining().count(), at_most));
  }

 private:
  Milliseconds budget_;
  Clock::time_point end_;
};

}  // namespace switchyard::detail

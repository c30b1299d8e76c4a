// SPDX-License-Identifier: Apache-2.0
// Converts ticks of a counter that is faster to read than a clock to nanoseconds.
#pragma once

#include <cstdint>
#include <vector>

namespace switchyard::detail {

/// A clock known at some ticks, the anchors, and interpolated elsewhere. Monotonic: anchors with equal times, as from a coarse
/// clock, have slope 0 between them.
class TickClock {
 public:
  void add(uint64_t ticks, uint64_t ns) { anchors_.push_back({ticks, ns}); }
  /// Adds an anchor later than all others. It replaces the previous one if that is less than `interval_ns` older and not the
  /// first, because the error of an anchor must be small relative to the time between two.
  void add_latest(uint64_t ticks, uint64_t ns, uint64_t interval_ns);
  /// Call after the last add(): sorts the anchors and keeps one of each tick.
  void sort();
  /// Call after sort(). If false, ns() must not be called.
  bool usable() const { return anchors_.size() >= 2; }
  /// Interpolates between two anchors; before the first and after the last it uses the slope from the first to the last,
  /// because adjacent anchors may be a few ticks apart, with an arbitrary slope.
  uint64_t ns(uint64_t ticks) const;

 private:
  struct Anchor {
    uint64_t ticks, ns;
  };
  std::vector<Anchor> anchors_;
};

}  // namespace switchyard::detail

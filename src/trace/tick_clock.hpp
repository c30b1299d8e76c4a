// SPDX-License-Identifier: Apache-2.0
// Converts ticks to nanoseconds, for a counter that is faster to read than a clock.
#pragma once

#include <cstdint>
#include <vector>

namespace switchyard::detail {

/// A clock that is known at some ticks, the anchors, and interpolated elsewhere. Monotonic: between anchors with equal times,
/// as from a coarse clock, the slope is 0.
class TickClock {
 public:
  void add(uint64_t ticks, uint64_t ns) { anchors_.push_back({ticks, ns}); }
  /// Adds an anchor that is later than all others. It replaces the previous anchor if that one is less than `interval_ns` older
  /// and not the first, because an anchor's error must be small relative to the time between two anchors.
  void add_latest(uint64_t ticks, uint64_t ns, uint64_t interval_ns);
  /// Call after the last add(): sorts the anchors and keeps one per tick.
  void sort();
  /// Call after sort(). If false, ns() must not be called.
  bool usable() const { return anchors_.size() >= 2; }
  /// Interpolates between two anchors. Before the first and after the last anchor, uses the slope from the first to the last,
  /// because adjacent anchors may be only a few ticks apart and have an arbitrary slope.
  uint64_t ns(uint64_t ticks) const;

 private:
  struct Anchor {
    uint64_t ticks, ns;
  };
  std::vector<Anchor> anchors_;
};

}  // namespace switchyard::detail

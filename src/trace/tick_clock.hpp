// SPDX-License-Identifier: Apache-2.0
// Nanoseconds out of ticks of a counter that is faster to read than a clock.
#pragma once

#include <cstdint>
#include <vector>

namespace switchyard::detail {

/// A clock that is known at some of its ticks, the anchors, and elsewhere by their slope. Time never goes back: anchors of one
/// time, as a coarse clock leaves them, have slope 0 between them.
class TickClock {
 public:
  void add(uint64_t ticks, uint64_t ns) { anchors_.push_back({ticks, ns}); }
  /// Adds an anchor that is later than all others. It replaces the one before it if that is less than `apart_ns` older and not
  /// the first, because the error of an anchor must be small against the time between two.
  void add_latest(uint64_t ticks, uint64_t ns, uint64_t apart_ns);
  /// After the last add(): anchors in order, of two at the same tick one.
  void sort();
  /// After sort(). False: ns() must not be called.
  bool usable() const { return anchors_.size() >= 2; }
  /// Between two anchors by their slope; before the first and after the last by the slope from the first to the last: two that
  /// follow each other may be a few ticks apart, and their slope is anything.
  uint64_t ns(uint64_t ticks) const;

 private:
  struct Anchor {
    uint64_t ticks, ns;
  };
  std::vector<Anchor> anchors_;
};

}  // namespace switchyard::detail

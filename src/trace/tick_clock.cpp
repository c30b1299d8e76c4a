// SPDX-License-Identifier: Apache-2.0
#include "trace/tick_clock.hpp"

#include <algorithm>

namespace switchyard::detail {

void TickClock::add_latest(uint64_t ticks, uint64_t ns, uint64_t interval_ns) {
  if (anchors_.size() > 1 && ns - anchors_.back().ns < interval_ns) anchors_.pop_back();
  anchors_.push_back({ticks, ns});
}

void TickClock::sort() {
  std::sort(anchors_.begin(), anchors_.end(), [](const Anchor& a, const Anchor& b) { return a.ticks < b.ticks; });
  anchors_.erase(
      std::unique(anchors_.begin(), anchors_.end(), [](const Anchor& a, const Anchor& b) { return a.ticks == b.ticks; }),
      anchors_.end());
  for (size_t i = 1; i < anchors_.size(); ++i) anchors_[i].ns = std::max(anchors_[i].ns, anchors_[i - 1].ns);
}

uint64_t TickClock::ns(uint64_t ticks) const {
  const auto after =
      std::upper_bound(anchors_.begin(), anchors_.end(), ticks, [](uint64_t t, const Anchor& a) { return t < a.ticks; });
  const bool outside = after == anchors_.begin() || after == anchors_.end();
  const Anchor& a = outside ? anchors_.front() : *(after - 1);
  const Anchor& b = outside ? anchors_.back() : *after;
  const Anchor& from = after == anchors_.begin() ? a : outside ? b : a;
  if (b.ticks <= a.ticks) return from.ns;
  const double slope = static_cast<double>(b.ns - a.ns) / static_cast<double>(b.ticks - a.ticks);
  const double since = static_cast<double>(static_cast<int64_t>(ticks - from.ticks));
  return from.ns + static_cast<uint64_t>(static_cast<int64_t>(since * slope));
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#include "trace/device_trace.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "trace/tick_clock.hpp"

namespace switchyard::detail {

namespace {

/// Time from the first to the last record in a call's launches of one kind, in nanoseconds of the global timer.
struct Launch {
  uint64_t begin = ~uint64_t{0}, end = 0;
  int64_t tokens = 0;
  void add(const DeviceRecord& anchor) {
    begin = std::min(begin, anchor.end);
    end = std::max(end, anchor.end);
    tokens = launch_tokens(anchor.arg);
  }
};
using Launches = std::map<std::pair<uint32_t, int64_t>, Launch>;  // (Event, launch_call)

/// Maps the blocks on multiprocessors to launches. Only a block's first warp records anchors, and it ends as soon as it has no
/// more work. However, a block's next kernel begins only after all warps of this one have ended, so the last anchor before the
/// end of a span identifies its launch. The end is used, because other warps may begin a few cycles before the warp that
/// records anchors.
class Blocks {
 public:
  void add(int64_t block, const DeviceRecord& anchor, Launch* launch) {
    seen_[{block, anchor.multiprocessor}].push_back({anchor.begin, launch});
  }
  /// Call after the last add().
  void sort() {
    for (auto& [place, all] : seen_)
      std::sort(all.begin(), all.end(), [](const Seen& a, const Seen& b) { return a.cycles < b.cycles; });
  }
  /// Returns null if the launch's anchors were overwritten.
  Launch* launch_of(int64_t block, const DeviceRecord& span) const {
    const auto found = seen_.find({block, span.multiprocessor});
    if (found == seen_.end()) return nullptr;
    const std::vector<Seen>& all = found->second;
    const auto later =
        std::upper_bound(all.begin(), all.end(), span.end, [](uint64_t cycles, const Seen& s) { return cycles < s.cycles; });
    return later == all.begin() ? nullptr : (later - 1)->launch;
  }

 private:
  struct Seen {
    uint64_t cycles;
    Launch* launch;
  };
  std::map<std::pair<int64_t, uint16_t>, std::vector<Seen>> seen_;  // (block, multiprocessor)
};

/// Spans between marks, which are in the order in which they were recorded.
class Marks {
 public:
  void add(const DeviceRecord& mark, const HostTime& host) {
    const std::pair key{mark.bytes, mark.arg};
    if (mark.multiprocessor == DeviceRecord::kMarkBegin) {
      open_[key] = mark.end;
      return;
    }
    const auto begin = open_.find(key);
    if (begin == open_.end()) return;  // recorded before recording began, or overwritten
    spans.push_back({host.ns(begin->second), host.ns(mark.end), launch_tokens(mark.arg), static_cast<uint16_t>(mark.bytes),
                     RecordKind::span});
    open_.erase(begin);
  }
  std::vector<TraceRecord> spans;

 private:
  std::map<std::pair<uint32_t, int64_t>, uint64_t> open_;  // (Event, launch) -> time
};

/// Appends the spans in `calls` and those of `launches` in the order of their ends.
void append_calls(Tracer& tracer, Launches launches, std::vector<TraceRecord> calls, const HostTime& host) {
  for (const auto& [key, plan] : launches) {
    if (key.first != static_cast<uint32_t>(Event::plan)) continue;
    for (const Event with_plan : {Event::dispatch, Event::layer}) {
      const auto call = launches.find({static_cast<uint32_t>(with_plan), key.second});
      if (call != launches.end()) call->second.begin = std::min(call->second.begin, plan.begin);
    }
  }
  for (const auto& [key, launch] : launches)
    calls.push_back(
        {host.ns(launch.begin), host.ns(launch.end), launch.tokens, static_cast<uint16_t>(key.first), RecordKind::span});
  std::sort(calls.begin(), calls.end(), [](const TraceRecord& a, const TraceRecord& b) { return a.end_ns < b.end_ns; });
  for (const TraceRecord& call : calls) tracer.append(kHostTrack, call);
}

}  // namespace

HostTime::HostTime(const TimerReading& first, const TimerReading& last)
    : at_(last.round_trip_ns <= first.round_trip_ns ? last : first),
      error_ns_((std::max(first.round_trip_ns, last.round_trip_ns) + 1) / 2) {
  const int64_t drift = last.host_minus_timer - first.host_minus_timer;
  if (last.timer_ns > first.timer_ns && last.timer_ns - first.timer_ns > kMinReadingIntervalNs) {
    slope_ = static_cast<double>(drift) / static_cast<double>(last.timer_ns - first.timer_ns);
  } else if (drift != 0) {
    error_ns_ += static_cast<uint64_t>(drift < 0 ? -drift : drift);
  }
}

uint64_t HostTime::ns(uint64_t timer_ns) const {
  const auto since = static_cast<double>(static_cast<int64_t>(timer_ns - at_.timer_ns));
  return timer_ns + static_cast<uint64_t>(at_.host_minus_timer + static_cast<int64_t>(since * slope_));
}

void append_device_records(Tracer& tracer, const DeviceTrace& trace, const std::vector<uint32_t>& sizes,
                           const std::vector<DeviceRecord>& records, const HostTime& host) {
  std::map<uint16_t, TickClock> clocks;  // of multiprocessors
  Launches launches;
  Blocks blocks;
  Marks marks;
  const auto for_each = [&](auto&& f) {
    for (size_t track = 0; track < sizes.size(); ++track) {
      const uint32_t held = std::min(sizes[track], trace.capacity);
      for (uint32_t i = sizes[track] - held; i != sizes[track]; ++i)
        f(static_cast<int>(track), records[track * trace.capacity + (i & (trace.capacity - 1))]);
    }
  };
  for_each([&](int track, const DeviceRecord& r) {
    if (r.event != DeviceRecord::kAnchor) return;
    if (r.multiprocessor >= DeviceRecord::kMarkEnd) return marks.add(r, host);
    clocks[r.multiprocessor].add(r.begin, r.end);
    Launch& launch = launches[{r.bytes, launch_call(r.arg)}];
    launch.add(r);
    blocks.add(track / trace.warps, r, &launch);
  });
  for (auto& [multiprocessor, clock] : clocks) clock.sort();
  blocks.sort();
  for_each([&](int track, const DeviceRecord& r) {
    if (r.event == DeviceRecord::kAnchor) return;
    const auto clock = clocks.find(r.multiprocessor);
    if (clock == clocks.end() || !clock->second.usable()) return tracer.add_lost(track, 1);
    const uint64_t begin = clock->second.ns(r.begin), end = std::max(begin, clock->second.ns(r.end));
    if (Launch* const launch = blocks.launch_of(track / trace.warps, r)) launch->end = std::max(launch->end, end);
    tracer.append(track, {host.ns(begin), host.ns(end), r.arg, r.event, RecordKind::span, 0, r.bytes});
  });
  for (size_t track = 0; track < sizes.size(); ++track)
    if (sizes[track] > trace.capacity)
      tracer.add_lost(track == trace.marks() ? kHostTrack : static_cast<int>(track), sizes[track] - trace.capacity);
  append_calls(tracer, std::move(launches), std::move(marks.spans), host);
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#include "trace/device_trace.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "trace/tick_clock.hpp"

namespace switchyard::detail {

namespace {

/// From the first to the last anchor of a call's launches of one kind, in nanoseconds of the global timer.
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

void append_calls(Tracer& tracer, Launches launches, int64_t host_minus_timer) {
  for (const auto& [key, plan] : launches) {
    if (key.first != static_cast<uint32_t>(Event::plan)) continue;
    const auto call = launches.find({static_cast<uint32_t>(Event::dispatch), key.second});
    if (call != launches.end()) call->second.begin = std::min(call->second.begin, plan.begin);
  }
  std::vector<TraceRecord> calls;
  for (const auto& [key, launch] : launches)
    calls.push_back({launch.begin + static_cast<uint64_t>(host_minus_timer),
                     launch.end + static_cast<uint64_t>(host_minus_timer), launch.tokens, static_cast<uint16_t>(key.first),
                     RecordKind::span});
  std::sort(calls.begin(), calls.end(), [](const TraceRecord& a, const TraceRecord& b) { return a.end_ns < b.end_ns; });
  for (const TraceRecord& call : calls) tracer.append(kHostTrack, call);
}

}  // namespace

void append_device_records(Tracer& tracer, const DeviceTrace& trace, const std::vector<uint32_t>& sizes,
                           const std::vector<DeviceRecord>& records, int64_t host_minus_timer) {
  std::map<uint16_t, TickClock> clocks;  // of multiprocessors
  Launches launches;
  const auto for_each = [&](auto&& f) {
    for (size_t track = 0; track < sizes.size(); ++track) {
      const uint32_t held = std::min(sizes[track], trace.capacity);
      for (uint32_t i = sizes[track] - held; i != sizes[track]; ++i)
        f(static_cast<int>(track), records[track * trace.capacity + (i & (trace.capacity - 1))]);
    }
  };
  for_each([&](int, const DeviceRecord& r) {
    if (r.event != DeviceRecord::kAnchor) return;
    clocks[r.multiprocessor].add(r.begin, r.end);
    launches[{r.bytes, launch_call(r.arg)}].add(r);
  });
  for (auto& [multiprocessor, clock] : clocks) clock.sort();
  for_each([&](int track, const DeviceRecord& r) {
    if (r.event == DeviceRecord::kAnchor) return;
    const auto clock = clocks.find(r.multiprocessor);
    if (clock == clocks.end() || !clock->second.usable()) return tracer.add_lost(track, 1);
    const auto host_ns = [&](uint64_t cycles) { return clock->second.ns(cycles) + static_cast<uint64_t>(host_minus_timer); };
    const uint64_t begin = host_ns(r.begin), end = host_ns(r.end);
    tracer.append(track, {begin, std::max(begin, end), r.arg, r.event, RecordKind::span, 0, r.bytes});
  });
  for (size_t track = 0; track < sizes.size(); ++track)
    if (sizes[track] > trace.capacity) tracer.add_lost(static_cast<int>(track), sizes[track] - trace.capacity);
  append_calls(tracer, std::move(launches), host_minus_timer);
}

}  // namespace switchyard::detail

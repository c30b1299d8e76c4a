// SPDX-License-Identifier: Apache-2.0
// Records written by kernels, and their conversion to Tracer records.
#pragma once

#include <cstdint>
#include <vector>

#include "base/macros.hpp"
#include "trace/tracer.hpp"

namespace switchyard::detail {

/// A span in clock cycles of its multiprocessor, or an anchor that relates cycles to time, with `begin` in cycles and `end` in
/// nanoseconds of the GPU's global timer. A kernel's anchors also identify their launch: `arg` is the result of pack_launch,
/// and `bytes` is the launch's Event.
struct alignas(16) DeviceRecord {
  uint64_t begin;
  uint64_t end;
  int64_t arg;
  uint16_t event;  ///< Event, or kAnchor
  uint16_t multiprocessor;
  uint32_t bytes;

  static constexpr uint16_t kAnchor = 0xffff;
  static constexpr uint16_t kMarkBegin = 0xffff, kMarkEnd = 0xfffe;  ///< multiprocessors of marks, whose cycles are nanoseconds
};
static_assert(sizeof(DeviceRecord) == 32);

/// Identifies a launch within a buffer by the number of its call, its object's state in device memory, and its tokens.
SWITCHYARD_FN inline int64_t pack_launch(uint64_t epoch, const void* object, int64_t tokens) {
  const uint64_t place = reinterpret_cast<uint64_t>(object) >> 8 & 0xfff;
  return static_cast<int64_t>((epoch & 0xfffff) << 44 | place << 32 | (static_cast<uint64_t>(tokens) & 0xffffffff));
}
inline int64_t launch_tokens(int64_t launch) { return launch & 0xffffffff; }
/// Identical for all launches of one call.
inline int64_t launch_call(int64_t launch) { return launch >> 32; }

/// One rank's buffers in device memory. Trivially copyable. Each track is a ring that is written by one warp of one kernel at a
/// time. The last one holds marks: anchors that kernels of any stream append (DeviceTracing::mark).
struct DeviceTrace {
  DeviceRecord* records = nullptr;  ///< [tracks(), capacity]; null: tracing is off
  uint32_t* sizes = nullptr;        ///< [tracks()] number of records written, including overwritten ones
  int32_t blocks = 0;
  int32_t warps = 0;
  uint32_t capacity = 0;  ///< a power of two

  SWITCHYARD_FN uint64_t marks() const { return static_cast<uint64_t>(blocks) * static_cast<uint64_t>(warps); }
  SWITCHYARD_FN uint64_t tracks() const { return marks() + 1; }
};

/// Result of reading a GPU's global timer.
struct TimerReading {
  uint64_t timer_ns = 0;
  int64_t host_minus_timer = 0;  ///< this host's steady clock minus the timer, at the middle of the round trip
  uint64_t round_trip_ns = 0;    ///< its duration: the difference is within half of it
};

/// Converts a GPU's global timer to host time, using one reading before and one after a recording, because the two clocks drift
/// apart. If the readings are more than kMinReadingIntervalNs apart, times are interpolated linearly between them. For closer
/// readings, errors would dominate the slope, so a single offset is used for all times: that of the reading with the shorter
/// round trip.
class HostTime {
 public:
  static constexpr uint64_t kMinReadingIntervalNs = 100'000'000;

  explicit HostTime(const TimerReading& only) : HostTime(only, only) {}
  HostTime(const TimerReading& first, const TimerReading& last);
  /// Ascending in `timer_ns`.
  uint64_t ns(uint64_t timer_ns) const;
  /// Maximum error of ns() between the readings, assuming that each clock keeps its rate.
  uint64_t error_ns() const { return error_ns_; }

 private:
  TimerReading at_;
  double slope_ = 0;
  uint64_t error_ns_ = 0;
};

/// Appends the records written by kernels to `tracer`, in nanoseconds of this host's steady clock. `sizes` and `records` are
/// host copies of the buffers of `trace`. The time of a record is interpolated between the surrounding anchors of its
/// multiprocessor; records from a multiprocessor with fewer than two anchors are counted as lost. Spans for the calls are added
/// to the host's track. Two successive marks with the same event and `arg` are one span, so a replayed graph has one per
/// replay. Other calls extend from the first anchor of a launch to its last, or to the end of the last span in any of
/// its warps. A dispatch begins with its plan.
void append_device_records(Tracer& tracer, const DeviceTrace& trace, const std::vector<uint32_t>& sizes,
                           const std::vector<DeviceRecord>& records, const HostTime& host);

}  // namespace switchyard::detail

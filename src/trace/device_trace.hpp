// SPDX-License-Identifier: Apache-2.0
// Records that kernels write, and how they become records of a Tracer.
#pragma once

#include <cstdint>
#include <vector>

#include "base/macros.hpp"
#include "trace/tracer.hpp"

namespace switchyard::detail {

/// A span in clock cycles of its multiprocessor, or an anchor, which says when a cycle was: `begin` in cycles, `end` in
/// nanoseconds of the GPU's global timer.
struct DeviceRecord {
  uint64_t begin;
  uint64_t end;
  int64_t arg;
  uint16_t event;  ///< Event, or kAnchor
  uint16_t multiprocessor;
  uint32_t unused;

  static constexpr uint16_t kAnchor = 0xffff;
};
static_assert(sizeof(DeviceRecord) == 32);

/// One rank's buffers in device memory. Trivially copyable. Each track is written by one warp of one kernel at a time.
struct DeviceTrace {
  DeviceRecord* records = nullptr;  ///< [blocks * warps, capacity]; null: tracing is off
  uint32_t* sizes = nullptr;        ///< [blocks * warps] records that came, also those that found no room
  int32_t blocks = 0;
  int32_t warps = 0;
  uint32_t capacity = 0;

  SWITCHYARD_FN uint64_t tracks() const { return static_cast<uint64_t>(blocks) * static_cast<uint64_t>(warps); }
};

/// Appends what kernels recorded to `tracer`, in nanoseconds of this host's steady clock. `sizes` and `records` are host copies
/// of `trace`'s buffers; `host_minus_timer` is steady clock minus global timer, in nanoseconds. A record's time is interpolated
/// between the anchors of its multiprocessor around it; records of a multiprocessor without two anchors are counted as lost.
void append_device_records(Tracer& tracer, const DeviceTrace& trace, const std::vector<uint32_t>& sizes,
                           const std::vector<DeviceRecord>& records, int64_t host_minus_timer);

}  // namespace switchyard::detail

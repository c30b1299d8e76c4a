// SPDX-License-Identifier: Apache-2.0
// Records that kernels write, and how they become records of a Tracer.
#pragma once

#include <cstdint>
#include <vector>

#include "base/macros.hpp"
#include "trace/tracer.hpp"

namespace switchyard::detail {

/// A span in clock cycles of its multiprocessor, or an anchor, which says when a cycle was: `begin` in cycles, `end` in
/// nanoseconds of the GPU's global timer. A kernel's anchors also say which launch they belong to: `arg` is pack_launch's, and
/// `bytes` its Event.
struct alignas(16) DeviceRecord {
  uint64_t begin;
  uint64_t end;
  int64_t arg;
  uint16_t event;  ///< Event, or kAnchor
  uint16_t multiprocessor;
  uint32_t bytes;

  static constexpr uint16_t kAnchor = 0xffff;
};
static_assert(sizeof(DeviceRecord) == 32);

/// Tells the launches that a buffer holds apart: by the call's number, its object's state in device memory, and its tokens.
SWITCHYARD_FN inline int64_t pack_launch(uint64_t epoch, const void* object, int64_t tokens) {
  const uint64_t place = reinterpret_cast<uint64_t>(object) >> 8 & 0xfff;
  return static_cast<int64_t>((epoch & 0xfffff) << 44 | place << 32 | (static_cast<uint64_t>(tokens) & 0xffffffff));
}
inline int64_t launch_tokens(int64_t launch) { return launch & 0xffffffff; }
/// Equal for all launches of one call.
inline int64_t launch_call(int64_t launch) { return launch >> 32; }

/// One rank's buffers in device memory. Trivially copyable. Each track is a ring, written by one warp of one kernel at a time.
struct DeviceTrace {
  DeviceRecord* records = nullptr;  ///< [blocks * warps, capacity]; null: tracing is off
  uint32_t* sizes = nullptr;        ///< [blocks * warps] records that came, also those that others have replaced
  int32_t blocks = 0;
  int32_t warps = 0;
  uint32_t capacity = 0;  ///< a power of two

  SWITCHYARD_FN uint64_t tracks() const { return static_cast<uint64_t>(blocks) * static_cast<uint64_t>(warps); }
};

/// Appends what kernels recorded to `tracer`, in nanoseconds of this host's steady clock. `sizes` and `records` are host copies
/// of `trace`'s buffers; `host_minus_timer` is steady clock minus global timer, in nanoseconds. A record's time is interpolated
/// between the anchors of its multiprocessor around it; records of a multiprocessor without two anchors are counted as lost.
/// On the host's track come spans of the calls: from the first anchor of a launch to its last; a dispatch begins with its plan.
void append_device_records(Tracer& tracer, const DeviceTrace& trace, const std::vector<uint32_t>& sizes,
                           const std::vector<DeviceRecord>& records, int64_t host_minus_timer);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Tracing of one rank's kernels: buffers and conversion of GPU timer values to host time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "exchange/gpu/memory.hpp"
#include "trace/device_trace.hpp"

namespace switchyard::detail {

/// 128 bytes of zeroed host memory, addressed by a kernel as `device`.
struct ClockMailbox {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
};

class DeviceTracing {
 public:
  /// Kernels launched from now on record into `trace()`. Waits for `stream`. Reads the GPU's timer unless other kernels occupy
  /// the GPU for more than a second. The buffers are kept until this object is destroyed because captured kernels may still
  /// write to them.
  void start(int blocks, int warps, size_t capacity, const ClockMailbox& mailbox, gpu::Stream stream);
  /// Reads the timer again and moves the recorded spans into `tracer`. Waits for the current device.
  void stop(Tracer& tracer, const ClockMailbox& mailbox, gpu::Stream stream);
  /// See DeviceRank::mark_trace. Call only while recording.
  void mark(Event event, int64_t launch, bool begins, gpu::Stream stream) const;
  /// The trace for CallContext; off before start() and after stop().
  const DeviceTrace& trace() const { return active_; }

 private:
  DeviceMemory memory_;
  DeviceTrace buffers_, active_;
  std::optional<TimerReading> first_;  ///< of the last start()
};

/// Reads the current device's global timer several times and keeps the reading with the shortest round trip, usually about two
/// microseconds. Returns nothing if a query is not answered within a second. Waits for `stream`.
std::optional<TimerReading> read_timer(const ClockMailbox& mailbox, gpu::Stream stream);

}  // namespace switchyard::detail

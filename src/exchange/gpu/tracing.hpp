// SPDX-License-Identifier: Apache-2.0
// Tracing of one rank's kernels: buffers, and what the GPU's timer says in host time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "exchange/gpu/memory.hpp"
#include "trace/device_trace.hpp"

namespace switchyard::detail {

/// Host memory, zero, that a kernel reaches as `device`. 128 bytes.
struct ClockMailbox {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
};

class DeviceTracing {
 public:
  /// Kernels launched from now on record into `trace()`. Waits for `stream`, and reads the GPU's timer unless the GPU is busy
  /// with other kernels for more than a second. The buffers are kept until this object goes, because captured kernels may still
  /// write to them.
  void start(int blocks, int warps, size_t capacity, const ClockMailbox& mailbox, gpu::Stream stream);
  /// Reads the timer again and brings what was recorded into `tracer`. Waits for the current device.
  void stop(Tracer& tracer, const ClockMailbox& mailbox, gpu::Stream stream);
  /// For CallContext; off before start and after stop.
  const DeviceTrace& trace() const { return active_; }

 private:
  DeviceMemory memory_;
  DeviceTrace buffers_, active_;
  std::optional<TimerReading> first_;  ///< of the last start()
};

/// Asks the current device for its global timer a number of times; the exchange with the shortest way there and back counts,
/// usually about two microseconds. Nothing if a question was not answered within a second. Waits for `stream`.
std::optional<TimerReading> read_timer(const ClockMailbox& mailbox, gpu::Stream stream);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Tracing of one rank's kernels: buffers, and what the GPU's timer says in host time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "exchange/cuda/device_memory_owner.hpp"
#include "trace/device_trace.hpp"

namespace switchyard::detail {

/// Host memory, zero, that a kernel reaches as `device`. 128 bytes.
struct ClockMailbox {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
};

class DeviceTracing {
 public:
  /// Kernels launched from now on record into `trace()`. Waits for `stream`. The buffers are kept until this object goes,
  /// because captured kernels may still write to them.
  void start(int blocks, int warps, size_t capacity, cudaStream_t stream);
  /// Brings what was recorded into `tracer`. Waits for the current device.
  void stop(Tracer& tracer, const ClockMailbox& mailbox, cudaStream_t stream);
  /// For CallContext; off before start and after stop.
  const DeviceTrace& trace() const { return active_; }

 private:
  DeviceMemory memory_;
  DeviceTrace buffers_, active_;
};

/// Steady clock of this host minus global timer of the current device, in nanoseconds, within about a microsecond: the exchange
/// with the shortest way there and back counts. `way_ns`: that way.
int64_t host_minus_timer(const ClockMailbox& mailbox, cudaStream_t stream, uint64_t* way_ns = nullptr);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "arch/gpu_runtime.hpp"

namespace switchyard::detail {

/// The current device's stream for copies and fills from the host and for launches that never wait for a peer; each is followed
/// by cudaStreamSynchronize. It does not synchronize with the legacy default stream. There is one stream per device, created
/// once, kept for the lifetime of the process and shared by all its ranks and heaps. The driver maps streams to few hardware
/// queues. The more streams a process has used, the more likely calls of two ranks share a queue and wait for each other.
/// Thread-safe. Throws Error(system).
gpu::Stream copy_stream();

}  // namespace switchyard::detail

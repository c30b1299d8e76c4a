// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "arch/gpu_runtime.hpp"

namespace switchyard::detail {

/// The stream of the current device for what the host copies and clears and for launches that never wait for a peer, each
/// followed by cudaStreamSynchronize. It does not synchronise with the legacy default stream. One per device, made once and
/// kept for the life of the process, for all ranks and heaps in it: the driver maps streams to few hardware queues, and the
/// more streams a process has used, the likelier two ranks' calls share one and wait for each other. Thread safe. Throws
/// system.
gpu::Stream copy_stream();

}  // namespace switchyard::detail

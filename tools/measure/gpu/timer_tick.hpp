// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace switchyard::measure {

/// Resolution of the current device's %globaltimer in nanoseconds: the smallest step that a thread observes within a few
/// milliseconds, or 0 if it observes none. Waits for the GPU. \throws std::runtime_error naming the failed call.
uint64_t global_timer_tick();

}  // namespace switchyard::measure

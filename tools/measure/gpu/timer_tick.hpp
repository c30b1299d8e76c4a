// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace switchyard::measure {

/// Nanoseconds by which %globaltimer of the current device advances at a time: the smallest of the steps that a thread sees
/// within some milliseconds; 0 if it sees none. Waits for the GPU. \throws std::runtime_error naming the failed call.
uint64_t global_timer_tick();

}  // namespace switchyard::measure

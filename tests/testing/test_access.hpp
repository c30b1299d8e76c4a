// SPDX-License-Identifier: Apache-2.0
// Test-only control of a group, unavailable to users. It is in the library switchyard_testing, which is not installed.
#pragma once

#include <cstdint>

#include "switchyard/group.hpp"

namespace switchyard::detail {

/// Objects created from `group` from now on number their calls starting at this epoch (modulo 2^40) instead of 1. For tests of
/// the wrap. Must be equal on all ranks.
void number_calls_from(Group& group, uint64_t first_epoch);

/// Several hosts: objects created from `group` from now on send about `bytes` bytes to a peer at a time (default 4 MiB), so
/// small calls have many rounds. Must be equal on all ranks. No effect on one host.
void cross_in_rounds_of(Group& group, int64_t bytes);

/// CPU: calls of objects created from `group` from now on perform a copy only when it is settled, so a protocol that omits a
/// settle gives wrong results (arch CpuDeferred). May differ by rank. No effect on groups of GPUs.
void defer_copies(Group& group);

}  // namespace switchyard::detail

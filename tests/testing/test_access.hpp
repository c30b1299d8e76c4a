// SPDX-License-Identifier: Apache-2.0
// Test-only control of a group, unavailable to users: library switchyard_testing, which is not installed.
#pragma once

#include <cstdint>

#include "switchyard/group.hpp"

namespace switchyard::detail {

/// Objects made from `group` from now on number their calls from this epoch, modulo 2^40, instead of 1: for tests of the wrap.
/// Must be equal on all ranks.
void number_calls_from(Group& group, uint64_t first_epoch);

/// Several hosts: objects made from `group` from now on send a peer about `bytes` bytes at a time (default 4 MiB), so that
/// small calls have many rounds. Must be equal on all ranks. No effect on one host.
void cross_in_rounds_of(Group& group, int64_t bytes);

/// CPU: calls of objects made from `group` from now on perform a copy only when it is settled, so that a protocol that omits a
/// settle gives wrong results (arch CpuDeferred). May differ by rank. No effect on groups of GPUs.
void defer_copies(Group& group);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// What tests change in a group, and users cannot: library switchyard_testing, which is not installed.
#pragma once

#include <cstdint>

#include "switchyard/group.hpp"

namespace switchyard::detail {

/// The objects that are made from `group` from now on count their calls from this epoch, modulo 2^40, instead of 1: for tests
/// of the wrap. The same on all ranks.
void number_calls_from(Group& group, uint64_t first_epoch);

/// Several hosts: objects that are made from `group` from now on give a peer about so many bytes at a time (usually 4 MiB), so
/// that small calls have many rounds. The same on all ranks. On one host nothing changes.
void cross_in_rounds_of(Group& group, int64_t bytes);

/// CPU: calls of the objects that are made from `group` from now on perform a copy only when it is settled, so that a protocol
/// that forgets to settle gives wrong results (arch CpuDeferred). May differ by rank. On groups of GPUs nothing changes.
void defer_copies(Group& group);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Test-only control of a group, unavailable to users. It is in the library switchyard_testing, which is not installed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "switchyard/group.hpp"

namespace switchyard::detail {

/// Objects subsequently created from `group` number their calls starting at this epoch (modulo 2^40) instead of 1. For
/// wraparound tests. Must be identical on all ranks.
void number_calls_from(Group& group, uint64_t first_epoch);

/// On several hosts, objects subsequently created from `group` send about `bytes` bytes to a peer at a time (default 4 MiB), so
/// that small calls have many rounds. Must be identical on all ranks. Has no effect on one host.
void cross_in_rounds_of(Group& group, int64_t bytes);

/// Returns heap_used() of `group` after waiting until the work of destroyed objects is done: on GPUs, an object that is
/// destroyed keeps its heap block until then (docs/design/0059).
size_t heap_used_after_work(Group& group);

/// Bytes that a rank's carriers were given to send and to receive, and the number of their rounds.
struct Carried {
  std::atomic<uint64_t> sent{0}, received{0}, rounds{0};
};
/// On several hosts, objects subsequently created from `group` count what they carry in `carried`, which must outlive the
/// group.
void count_carried(Group& group, Carried& carried);

/// On several hosts, objects subsequently created from `group` call `see` with the number of bytes that a round sends and
/// receives, before they post it to the carrier.
void watch_carried(Group& group, const std::function<void(size_t)>& see);

/// On several hosts, objects subsequently created from `group` call `act` before they post a round to the carrier.
void before_rounds(Group& group, const std::function<void()>& act);

/// CPU: calls on objects subsequently created from `group` perform a copy only when it is settled, so that a protocol that
/// omits a settle produces wrong results (arch CpuDeferred). May differ by rank. Has no effect on GPU groups.
void defer_copies(Group& group);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Definitions shared by the phases of all calls across several hosts.
#pragma once

#include "protocol/call.hpp"

namespace switchyard::detail {

/// Slots per rail and direction: while the rows of one round are packed or taken, the others are in flight.
inline constexpr int kRoundSlots = 3;

/// Head of a message: its call and a number chosen by the sender.
struct RelayHead {
  uint64_t call;
  uint64_t operation;
  int64_t number;
  uint64_t bytes;
};
/// The head of a message of this call with `bytes` bytes.
SWITCHYARD_FN inline RelayHead relay_head(const CallContext& call, int64_t number, uint64_t bytes) {
  return {call.word(), static_cast<uint64_t>(call.operation), number, bytes};
}
/// True if a message with this head belongs to this call and has `bytes` bytes.
SWITCHYARD_FN inline bool is_of_call(const RelayHead& head, const CallContext& call, uint64_t bytes) {
  return head.call == call.word() && head.operation == static_cast<uint64_t>(call.operation) && head.bytes == bytes;
}

/// Adds to this warp's counts from earlier phases of the call.
template <class A>
SWITCHYARD_FN void add_moved(typename A::Warp& w, const CallContext& call, const MoveCounter& moved) {
  A::for_lanes(w, 1, [&](int) {
    MoveCounter& to = call.moved[w.index()];
#define SY_STATISTIC_MOVED(name) to.name += moved.name;
#define SY_STATISTIC_TIME(name)
#include "switchyard/statistics.def"
  });
}

}  // namespace switchyard::detail

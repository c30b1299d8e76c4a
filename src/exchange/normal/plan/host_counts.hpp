// SPDX-License-Identifier: Apache-2.0
// The first half of a plan on the CPU: the exchange of routing counts. Used by normal mode and the fused layer.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "arch/cpu/cpu_arch.hpp"
#include "heap/collective_step.hpp"
#include "plan/decisions.hpp"
#include "plan/plan.hpp"
#include "protocol/counts.hpp"

namespace switchyard::detail {

/// A rank whose call has another signature; rank -1: none.
struct OtherCall {
  int rank = -1;
  uint64_t signature = 0;
};

/// Sends the counts of `local` to all ranks, gathers theirs and fills `counts`. Call from one warp of each rank, with the epoch
/// in `call`. `row`: scratch of counts_row_bytes(). `*other`: set to the last rank whose signature differs. Returns false after
/// a (recorded) fault. `relay`: as in exchange_counts.
template <class A, class Relay = NoRelay>
bool exchange_host_counts(CpuWarp& w, const CallContext& call, const ControlLayout& control, const CountsHead& head,
                          const LocalPlan& local, std::vector<std::byte>& row, GatheredCounts& counts, OtherCall* other,
                          const Relay& relay = {}) {
  const auto experts = static_cast<size_t>(control.experts), ranks = static_cast<size_t>(control.world);
  std::memcpy(row.data(), &head, sizeof head);
  std::memcpy(row.data() + sizeof head, local.tokens_per_rank.data(), 4 * ranks);
  std::memcpy(row.data() + sizeof head + 4 * ranks, local.routes_per_expert.data(), 4 * experts);
  {
    const TraceSpan span(call.tracer, kHostTrack, Event::exchange_counts, control.counts_row_bytes() * control.world);
    if (!exchange_counts<A>(w, call, control, row.data(), relay)) return false;
  }
  counts.world = control.world;
  counts.experts = control.experts;
  counts.routes.resize(ranks * experts);
  counts.touching.resize(ranks * ranks);
  counts.tokens.resize(ranks);
  counts.capacity.resize(ranks);
  *other = {};
  for (size_t r = 0; r < ranks; ++r) {
    const CountsHead* const theirs = call.heap.local(control.counts_head(call.epoch, static_cast<int>(r)));
    const auto* const body = reinterpret_cast<const int32_t*>(theirs + 1);
    if (theirs->signature != head.signature) *other = {static_cast<int>(r), theirs->signature};
    counts.tokens[r] = theirs->tokens;
    counts.capacity[r] = theirs->capacity;
    std::memcpy(&counts.touching[r * ranks], body, 4 * ranks);
    std::memcpy(&counts.routes[r * experts], body + ranks, 4 * experts);
  }
  return true;
}

/// The first rank that would receive more rows than its capacity, or -1; identical on all ranks.
inline int first_overflow(const GatheredCounts& counts, Layout layout, int alignment) {
  for (int r = 0; r < counts.world; ++r)
    if (overflows(counts.rows_needed(layout, alignment, r), counts.capacity[static_cast<size_t>(r)])) return r;
  return -1;
}

/// With Overflow::fail, throws on all ranks if any would receive more rows than its capacity. `call` and `member`, the option
/// that sets the capacity, are used in the error message.
inline void check_capacity(const GatheredCounts& counts, Layout layout, int alignment, const std::string& call,
                           const char* member) {
  const int r = first_overflow(counts, layout, alignment);
  if (r < 0) return;
  throw AgreedError(ErrorCode::capacity_exceeded,
                    call + ": rank " + std::to_string(r) + " would receive " +
                        std::to_string(counts.rows_needed(layout, alignment, r)) + " rows, its capacity is " +
                        std::to_string(counts.capacity[static_cast<size_t>(r)]) +
                        "; nothing was sent and the group can be used (raise " + member + " or choose drop_and_report)");
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// The one bounded wait. Every spin of every protocol is here, so every spin has a deadline, watches the abort word, names its
// site and is accounted to the rank that it waited for.
#pragma once

#include "protocol/call.hpp"

namespace switchyard::detail {

/// Writes the fault record unless another warp was first.
template <class A>
SWITCHYARD_FN void record_fault(typename A::Warp& w, const CallContext& call, Site site, bool aborted, int awaited,
                                uint64_t expected, uint64_t seen, uint64_t waited_ns) {
  if (A::template fetch_add<Scope::device>(w, &call.fault->claimed, 1, Site::local_sends) != 0) return;
  A::for_lanes(w, 1, [&](int) {
    FaultRecord& f = *call.fault;
    f.aborted = aborted;
    f.awaited_rank = awaited;
    f.expected = expected;
    f.seen = seen;
    f.waited_ns = waited_ns;
    f.site = site;
  });
}

/// Progress of a wait that did not succeed at once. Not for reuse.
template <class A>
class WaitClock {
 public:
  SWITCHYARD_FN WaitClock(const CallContext& call, int awaited) : start_(A::now_ns()), slice_(start_), awaited_(awaited) {
    deadline_ = start_ + call.timeout_ns;
  }

  /// Charges the time so far to the awaited rank and turns to the next one.
  SWITCHYARD_FN void charge(typename A::Warp& w, const CallContext& call, int next_awaited) {
    const uint64_t now = A::now_ns(), spent = now - slice_;
    A::for_lanes(w, 1, [&](int) {
      WaitCounter& c = call.waits[static_cast<int64_t>(w.index()) * call.world() + awaited_];
      c.total_ns += spent;
      c.max_ns = spent > c.max_ns ? spent : c.max_ns;
      c.waits += 1;
    });
    slice_ = now;
    awaited_ = next_awaited;
  }

  /// Call after each failed poll. False: the deadline has passed or someone aborted; the fault is recorded and the call must
  /// end.
  SWITCHYARD_FN bool keep_waiting(typename A::Warp& w, const CallContext& call, Site site, const uint64_t* flag,
                                  uint64_t expected) {
    A::pause(w, polls_++);
    if ((polls_ & 15) != 0) return true;
    const bool aborted = A::template load_acquire<Scope::system>(call.abort_word, Site::none) != 0;
    const uint64_t now = A::now_ns();
    if (!aborted && static_cast<int64_t>(now - deadline_) < 0) return true;
    const uint64_t seen = A::template load_acquire<Scope::system>(flag, site);
    record_fault<A>(w, call, site, aborted, awaited_, expected, seen, now - start_);
    charge(w, call, awaited_);
    return false;
  }

  SWITCHYARD_FN int awaited() const { return awaited_; }

 private:
  uint64_t start_, slice_, deadline_;
  int awaited_;
  int polls_ = 0;
};

/// Waits until flags[i], written by rank i for all i in [0, n), have reached `expected`. On success everything that the writers
/// released is visible to this warp. On failure the fault is recorded; the caller returns without touching shared data.
template <class A>
SWITCHYARD_FN bool wait_all(typename A::Warp& w, const CallContext& call, const uint64_t* const* flags, int n,
                            uint64_t expected, Site site) {
  int missing = A::template poll_all<Scope::system>(w, flags, n, expected, site);
  if (missing < 0) return true;
  WaitClock<A> clock(call, missing);
  while (true) {
    if (!clock.keep_waiting(w, call, site, flags[missing], expected)) return false;
    missing = A::template poll_all<Scope::system>(w, flags, n, expected, site);
    if (missing != clock.awaited()) clock.charge(w, call, missing);
    if (missing < 0) return true;
  }
}

/// Waits for one flag, written by rank `peer`.
template <class A>
SWITCHYARD_FN bool wait_one(typename A::Warp& w, const CallContext& call, const uint64_t* flag, int peer, uint64_t expected,
                            Site site) {
  if (A::template poll_all<Scope::system>(w, &flag, 1, expected, site) < 0) return true;
  WaitClock<A> clock(call, peer);
  while (true) {
    if (!clock.keep_waiting(w, call, site, flag, expected)) return false;
    if (A::template poll_all<Scope::system>(w, &flag, 1, expected, site) < 0) break;
  }
  clock.charge(w, call, peer);
  return true;
}

/// Counts the warps of this rank that have finished a phase; `counter` only ever grows. True for the last one: it is then
/// ordered after everything that all warps of the rank settled before they arrived.
template <class A>
SWITCHYARD_FN bool arrive_is_last(typename A::Warp& w, uint64_t* counter) {
  const uint64_t before = A::template fetch_add<Scope::device>(w, counter, 1, Site::local_sends);
  return (before + 1) % static_cast<uint64_t>(w.total()) == 0;
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// The bounded wait of all protocols and kernels. Every wait for a rank uses it and therefore has a deadline, polls the abort
// word, reports its site and charges its time to the awaited rank. An arch executes it on a warp or, like CudaLane, on a single
// lane: the fused kernel polls with all lanes and runs the checks on one (exchange/fused/layer_storage.cuh).
#pragma once

#include "arch/bits.hpp"
#include "protocol/call.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

/// Index of a warp in its rank, assigned such that neighbors are on different multiprocessors.
template <class Warp>
SWITCHYARD_FN int64_t spread_index(const Warp& w) {
  return int64_t{w.warp()} * w.num_blocks() + w.block();
}

/// A warp's share of work that is assigned round-robin to the warps of some blocks, with neighboring items on different
/// multiprocessors.
struct Share {
  int64_t index, step;
};
template <class Warp>
SWITCHYARD_FN Share share_of_blocks(const Warp& w, int first, int end) {
  const int64_t blocks = end - first;
  return {int64_t{w.warp()} * blocks + w.block() - first, blocks * w.warps_per_block()};
}

/// Writes this rank's failure to the abort words in all ranks' device memory (see CallContext::host_abort_word), except those
/// already set.
template <class A>
SWITCHYARD_FN void spread_abort(typename A::Warp& w, const CallContext& call, uint64_t word) {
  for (int r = 0; r < call.world(); ++r) {
    if (!is_mapped<A>(call.heap, r)) continue;                // its host reads the failure from this rank
    uint64_t* theirs = call.heap.at(r, SymPtr<uint64_t>{0});  // HeapHeader::abort_word
    if (A::template load_acquire<Scope::system>(theirs, Site::none) == 0)
      A::template store_release<Scope::system>(w, theirs, word, Site::none);
  }
}

/// The call's epoch, for kernels that know it only on the device taken from their warp.
template <class Warp>
SWITCHYARD_FN uint64_t epoch_of(const Warp& w, const CallContext& call) {
  if constexpr (requires { w.epoch(); })
    return w.epoch();
  else
    return call.epoch;
}

/// Writes `fault` as this rank's fault record unless another warp has already done so, and spreads the abort to all ranks.
template <class A>
SWITCHYARD_FN void record_fault(typename A::Warp& w, const CallContext& call, const FaultRecord& fault) {
  if (A::template fetch_add<Scope::device>(w, call.fault_claims, 1, Site::local_sends) != 0) return;
  if (call.host_abort_word) {
    const ErrorCode reason = fault.mismatch ? ErrorCode::mismatch : ErrorCode::peer_timeout;
    spread_abort<A>(
        w, call, fault.aborted ? fault.seen_abort : make_abort_word(call.rank(), static_cast<int>(reason), fault.awaited_rank));
  }
  A::for_lanes(w, 1, [&](int) {
    FaultRecord& f = *call.fault;
    f = fault;
    f.ready = 0;
    f.epoch = epoch_of(w, call);
    f.operation = call.operation;
  });
  A::template store_release<Scope::system>(w, &call.fault->ready, 1, Site::none);
}

/// Records that `rank` made a different call. `mine` and `theirs`: the words that differ, from which the host names the option
/// (exchange/group/call_difference.hpp); equal if not known. \returns false
template <class A>
SWITCHYARD_FN bool record_mismatch(typename A::Warp& w, const CallContext& call, Site site, int rank, uint64_t mine = 0,
                                   uint64_t theirs = 0) {
  FaultRecord fault;
  fault.expected = mine;
  fault.seen = theirs;
  fault.site = site;
  fault.mismatch = true;
  fault.awaited_rank = rank;
  record_fault<A>(w, call, fault);
  return false;
}

/// True if rank `r` has made a different call than this rank. Applies only where all ranks make the calls of a group in the
/// same order.
template <class A>
SWITCHYARD_FN bool made_other_call(const CallContext& call, int r) {
  if constexpr (requires { A::kCallsInOrder; }) {
    const SymPtr<HeapHeader> header{0};
    const HeapHeader* const theirs = call.heap.base[r] != nullptr ? call.heap.at(r, header) : call.headers[r];
    return calls_of_both(*call.heap.local(header), *theirs, A::peek).differ();
  }
  return false;
}

/// True if data that rank `r` delivered before it left may still be in flight.
template <class A>
SWITCHYARD_FN bool may_be_in_flight(const CallContext& call, int r) {
  if constexpr (requires { A::kCallsInOrder; }) {
    if (call.heap.base[r] != nullptr) return false;  // same host: its stores precede its departure
    return A::now_ns() - A::peek(&call.headers[r]->left_ns) < kInFlightNs;
  }
  return false;
}

/// Returns the word that ends a wait for rank `awaited`: an abort word, or a word for that rank's departure; 0 if there is
/// none. `host`: also checks the words that a GPU finds only in host memory.
template <class A>
SWITCHYARD_FN uint64_t find_end(const CallContext* call, int awaited, bool host) {
  const uint64_t abort = A::template load_acquire<Scope::system>(call->abort_word, Site::none);
  if (abort != 0 || !host) return abort;
  if (call->host_abort_word) {
    const uint64_t word = A::template load_acquire<Scope::system>(call->host_abort_word, Site::none);
    if (word != 0) return word;
  }
  const uint64_t left = A::template load_acquire<Scope::system>(call->left_ranks, Site::none);
  if ((left >> awaited & 1) == 0 || may_be_in_flight<A>(*call, awaited)) return 0;
  return make_left_word(awaited, static_cast<int>(ErrorCode::system));
}

/// True if a wait for `awaited` is a wait for this rank's own warps, which in turn wait for other ranks.
template <class A>
SWITCHYARD_FN bool awaits_own_work(const CallContext& call, int awaited) {
  if constexpr (requires { A::kAwaitsOwnWork; }) return awaited == call.rank();
  return false;
}
/// True if a wait for `awaited` that has lasted `waited` nanoseconds has reached its deadline. The deadline of a wait for own
/// work is twice as long, so that the wait for the late rank reports the fault.
template <class A>
SWITCHYARD_FN bool is_overdue(const CallContext& call, int awaited, uint64_t waited) {
  const uint64_t limit = awaits_own_work<A>(call, awaited) ? 2 * call.timeout_ns : call.timeout_ns;
  return static_cast<int64_t>(waited - limit) >= 0;
}

/// Checks whether a wait that began at time `start` must end because of the deadline, an abort word, the departure of the
/// awaited rank, or a different call by that rank. Returns true if the wait continues, or false if it ends after a last series
/// of polls (EndWait).
template <class A>
struct DeadlineCheck {
  SWITCHYARD_FN bool operator()(typename A::Warp& w, const CallContext* call, int awaited, uint64_t start, int looks) const {
    const uint64_t waited = A::now_ns() - start;
    return find_end<A>(call, awaited, !call->host_abort_word || asks_host(looks, w.index(), w.total())) == 0 &&
           !is_overdue<A>(*call, awaited, waited) && !made_other_call<A>(*call, awaited);
  }
};

/// Records why a wait ends; `seen()` returns the value of the awaited flag. Call only after polls that follow a DeadlineCheck
/// of false, so that data that a rank delivered before it left still ends the wait with success. \returns false, or true if the
/// wait is now for another rank and continues
template <class A, class Seen>
SWITCHYARD_FN bool end_wait(typename A::Warp& w, const CallContext& call, Site site, uint64_t expected, int awaited,
                            uint64_t start, Seen&& seen) {
  const uint64_t abort = find_end<A>(&call, awaited, true);
  if (abort == 0 && made_other_call<A>(call, awaited)) return record_mismatch<A>(w, call, site, awaited);
  const uint64_t waited = A::now_ns() - start;
  if (abort == 0 && !is_overdue<A>(call, awaited, waited)) return true;
  FaultRecord fault;
  fault.site = site;
  fault.aborted = abort != 0;
  fault.seen_abort = abort;
  fault.awaited_rank = awaited;
  fault.expected = expected;
  fault.seen = seen();
  fault.waited_ns = waited;
  record_fault<A>(w, call, fault);
  return false;
}
/// end_wait() for a flag in memory, as a functor for A::out_of_line.
template <class A>
struct EndWait {
  SWITCHYARD_FN bool operator()(typename A::Warp& w, const CallContext* call, Site site, const uint64_t* flag,
                                uint64_t expected, int awaited, uint64_t start) const {
    return end_wait<A>(w, *call, site, expected, awaited, start,
                       [&] { return A::template load_acquire<Scope::system>(flag, site); });
  }
};

/// Charges `spent` nanoseconds to the awaited rank, unless the wait was for this rank's own work.
template <class A>
struct ChargeWait {
  SWITCHYARD_FN bool operator()(typename A::Warp& w, const CallContext* call, int awaited, uint64_t spent) const {
    if (awaits_own_work<A>(*call, awaited)) return true;
    WaitCounter& c = call->waits[static_cast<int64_t>(w.index()) * call->world() + awaited];
    A::count(w, &c.total_ns, spent);
    A::count(w, &c.waits, 1);
    A::count_max(w, &c.max_ns, spent);
    return true;
  }
};

/// The last wait of a warp. Its accounting is deferred to the next wait, or until no urgent work is left, so that the awaited
/// data can be processed first.
template <class A>
class LastWait {
 public:
  SWITCHYARD_FN void set(typename A::Warp& w, const CallContext& call, int awaited, uint64_t spent) {
    account(w, call);
    awaited_ = awaited;
    spent_ = spent;
  }
  SWITCHYARD_FN void account(typename A::Warp& w, const CallContext& call) {
    if (awaited_ >= 0) A::out_of_line_if_cheap(w, ChargeWait<A>{}, &call, awaited_, spent_);
    awaited_ = -1;
  }

 private:
  int awaited_ = -1;
  uint64_t spent_ = 0;
};

/// Expected length of a wait.
enum class Wait : uint8_t {
  brief,
  long_with_many,  ///< many warps wait together; they sleep between polls from the first poll (docs/design/0004)
};

/// State of a wait whose first poll failed. Not reusable.
template <class A>
class WaitClock {
 public:
  SWITCHYARD_FN WaitClock() {}  ///< call begin() first
  SWITCHYARD_FN explicit WaitClock(int awaited, Wait wait = Wait::brief) { begin(awaited, wait); }

  SWITCHYARD_FN void begin(int awaited, Wait wait = Wait::brief) {
    start_ = slice_ = A::now_ns();
    awaited_ = awaited;
    polls_ = wait == Wait::brief ? 0 : kPollsOfLongWait;
  }

  /// Charges the time so far to the awaited rank, then starts waiting for `next_awaited`.
  SWITCHYARD_FN void charge(typename A::Warp& w, const CallContext& call, int next_awaited) {
    const uint64_t now = A::now_ns();
    A::out_of_line_if_cheap(w, ChargeWait<A>{}, &call, awaited_, now - slice_);
    slice_ = now;
    awaited_ = next_awaited;
  }

  /// Call after each failed poll. Returns false if the wait has ended (see EndWait): the fault is recorded and the call must
  /// end.
  SWITCHYARD_FN bool keep_waiting(typename A::Warp& w, const CallContext& call, Site site, const uint64_t* flag,
                                  uint64_t expected) {
    A::pause(w, polls_++);
    if (!is_check_due()) return true;
    if ((polls_ & kEnding) == 0) {
      if (polls_ >= 2 * kManyPolls) polls_ -= kManyPolls;
      if (!A::out_of_line(w, DeadlineCheck<A>{}, &call, awaited_, start_, polls_ / kPollsPerCheck)) polls_ |= kEnding;
      return true;
    }
    polls_ &= ~kEnding;
    if (A::out_of_line(w, EndWait<A>{}, &call, site, flag, expected, awaited_, start_)) return true;
    charge(w, call, awaited_);
    return false;
  }

  SWITCHYARD_FN int awaited() const { return awaited_; }
  /// Call after keep_waiting(). True once in sixteen polls, when keep_waiting() has also run its other checks.
  SWITCHYARD_FN bool is_check_due() const { return polls_ % kPollsPerCheck == 0; }
  /// Nanoseconds since begin() or the last charge().
  SWITCHYARD_FN uint64_t spent() const { return A::now_ns() - slice_; }

 private:
  uint64_t start_ = 0, slice_ = 0;
  static constexpr int kPollsPerCheck = 16;
  // The poll count at which a long wait starts, so that it sleeps between polls.
  static constexpr int kPollsOfLongWait = 1 << 16;
  static constexpr int kManyPolls = 1 << 23;  // the count wraps here; pauses between polls then have their maximum length
  static constexpr int kEnding = 1 << 30;     // only the polls until the next check are left

  int awaited_ = 0;
  int polls_ = 0;
};

/// Default for `diverged` in wait_for: makes no checks beyond those of DeadlineCheck.
struct NeverDiverged {
  template <class Warp>
  SWITCHYARD_FN bool operator()(Warp&, int) const {
    return false;
  }
};

/// Waits until all flags flag(i), i in [0, n), each written by rank writer(i), have reached `expected`. On success, everything
/// that the writers released is visible to this warp. On failure, the fault is recorded, and the caller must return without
/// accessing shared data. `span` covers the wait in a trace. The caller has opened it; if a wait was needed, its argument
/// becomes the last awaited rank. `diverged(w, rank)` is called occasionally. It returns true if the awaited rank makes a
/// different call; it must then have recorded the mismatch.
template <class A, class Flag, class Writer, class Diverged = NeverDiverged>
SWITCHYARD_FN bool wait_for(typename A::Warp& w, const CallContext& call, int n, Flag&& flag, uint64_t expected, Site site,
                            Writer&& writer, WarpSpan<A>& span, Wait wait = Wait::brief, const Diverged& diverged = {}) {
  int missing = A::template poll_from<Scope::system>(w, n, flag, expected, site);
  if (missing < 0) return true;
  WaitClock<A> clock(writer(missing), wait);
  while (true) {
    if (!clock.keep_waiting(w, call, site, flag(missing), expected)) return false;
    if (clock.is_check_due() && diverged(w, clock.awaited())) return false;
    missing = A::template poll_from<Scope::system>(w, n, flag, expected, site);
    if (missing < 0) {
      span.set_arg(clock.awaited());
      clock.charge(w, call, clock.awaited());
      return true;
    }
    if (writer(missing) != clock.awaited()) clock.charge(w, call, writer(missing));
  }
}

/// Waits until the flags of all ranks, where flag(r) is written by rank r, have reached this call.
template <class A, class Flag, class Diverged = NeverDiverged>
SWITCHYARD_FN bool wait_ranks(typename A::Warp& w, const CallContext& call, Flag&& flag, Site site, WarpSpan<A>& span,
                              const Diverged& diverged = {}) {
  return wait_for<A>(
      w, call, call.world(), flag, call.word(), site, [](int r) { return r; }, span, Wait::brief, diverged);
}

/// Counts this rank's warps, `warps` in total, as they finish a phase. Returns true only to the last of them. That warp is
/// ordered after everything that the other warps settled before they arrived. It resets `counter` to 0 for the next launch,
/// which may have a different number of warps.
template <class A>
SWITCHYARD_FN bool arrive_is_last(typename A::Warp& w, uint64_t* counter, int64_t warps) {
  const uint64_t before = A::template fetch_add<Scope::device>(w, counter, 1, Site::local_sends);
  if (before + 1 != static_cast<uint64_t>(warps)) return false;
  A::for_lanes(w, 1, [&](int) { *counter = 0; });
  return true;
}
template <class A>
SWITCHYARD_FN bool arrive_is_last(typename A::Warp& w, uint64_t* counter) {
  return arrive_is_last<A>(w, counter, w.total());
}

/// Per-block counters of finished warps, all 0 between calls. They are in the block's memory, so that arrivals among its warps
/// are fast. If null, warps count directly across all blocks.
struct BlockCounters {
  uint64_t* first = nullptr;
  int stride = 0;  ///< distance from block to block; 0 if each block has its own memory
};
/// Overload for all warps of `blocks` blocks. The warps of a block first count each other in the block's own counter `at`, and
/// the last one arrives on behalf of all of them. An arrival across blocks takes microseconds while the link is full, so this
/// lets most warps continue immediately.
template <class A>
SWITCHYARD_FN bool arrive_is_last(typename A::Warp& w, const BlockCounters& own, int at, uint64_t* counter, int blocks) {
  if (own.first == nullptr) return arrive_is_last<A>(w, counter, int64_t{blocks} * w.warps_per_block());
  uint64_t* const mine = own.first + int64_t{w.block()} * own.stride + at;
  const uint64_t before = A::template fetch_add<Scope::block>(w, mine, 1, Site::local_sends);
  if (before + 1 != static_cast<uint64_t>(w.warps_per_block())) return false;
  A::for_lanes(w, 1, [&](int) { *mine = 0; });
  return arrive_is_last<A>(w, counter, blocks);
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Rounds between hosts, shared by the warps of a rank. All warps pack the outgoing data of a round, warp 0 posts it and drives
// the carrier while it waits, and all warps take the data that arrived. Each direction has a ring of three slots: one being
// packed, one in flight, and one being taken.
//
// | flag    | written by                       | read by              | order           | scope  | reuse              |
// | network | last warp that packed, or took   | warp 0               | release/acquire | device | epoch, never reset |
// | network | warp 0, when a round has arrived | all warps            | release/acquire | device | epoch, never reset |
//
// Buffers: a slot is packed again after its round has been sent and receives again after all warps have taken its contents;
// warp 0 posts round k after both. Progress: every warp packs rounds 0, 1 and 2, then alternately takes round j and packs round
// j + 3, so no warp waits for a round before all warps have packed it. Rounds arrive in the same order at both ends. In
// between, warps wait only for ranks on this host, and these waits do not depend on the rounds.
#pragma once

#include "carrier/carrier.hpp"
#include "protocol/hosts/message.hpp"
#include "protocol/wait.hpp"
#include "protocol/work_queue.hpp"

namespace switchyard::detail {

/// Words private to a rank. Counters are 0 between calls; the other words are flags, {epoch, rounds}.
struct RoundWork {
  struct alignas(64) Word {
    uint64_t value = 0;
  };
  Word pack_next[kRoundSlots], take_next[kRoundSlots];  ///< items taken (work_queue.hpp)
  Word pack_done[kRoundSlots], take_done[kRoundSlots];  ///< counts of warps
  Word packed, arrived, taken;                          ///< flags
  Word awaited;                                         ///< the rank that warp 0 waits for

  void set_flags(uint64_t word) { packed.value = arrived.value = taken.value = word; }
};

/// `count` items of `stride` bytes each, `per_round` of them in each round except the last.
struct ItemsInRounds {
  int64_t count = 0, per_round = 1, stride = 0;
  std::byte* slots[kRoundSlots] = {};

  int64_t rounds() const { return (count + per_round - 1) / per_round; }
  int64_t begin(int64_t k) const { return k * per_round < count ? k * per_round : count; }
  int64_t in_round(int64_t k) const { return begin(k + 1) - begin(k); }
  int64_t bytes(int64_t k) const { return in_round(k) * stride; }
  std::byte* slot(int64_t k) const { return slots[k % kRoundSlots]; }
};

/// The rounds of one call. Trivially copyable.
struct Rounds {
  Carrier* carrier = nullptr;
  RoundWork* work = nullptr;
  uint64_t first = 0;  ///< number of the call's first round at the carrier
  int64_t count = 0;
};

/// Records that a round cannot complete. \returns false
template <class A>
bool record_broken(typename A::Warp& w, const CallContext& call, const RoundStatus& status) {
  if (status.state == RoundState::unlike) return record_mismatch<A>(w, call, Site::network, status.peer);
  // The end of a connection does not prove that the peer has died. The peer's monitor will report the cause shortly.
  const int peer = status.peer >= 0 ? status.peer : call.rank();
  const uint64_t start = A::now_ns();
  uint64_t word = 0;
  for (int64_t polls = 0; word == 0; ++polls) {
    const uint64_t waited = A::now_ns() - start;
    if (waited > kInFlightNs || waited > call.timeout_ns) break;
    A::pause(w, polls);
    word = find_end<A>(&call, peer, true);
  }
  FaultRecord fault;
  fault.site = Site::network;
  fault.aborted = true;
  fault.seen_abort = word != 0 ? word : make_abort_word(peer, static_cast<int>(ErrorCode::system));
  fault.awaited_rank = peer;
  fault.waited_ns = A::now_ns() - start;
  record_fault<A>(w, call, fault);
  return false;
}

/// Drives the carrier until `round` has been sent and received. Returns false after recording a fault. `awaited`: if not null,
/// is set to the awaited rank.
template <class A>
bool await_round(typename A::Warp& w, const CallContext& call, Carrier& carrier, uint64_t round, uint64_t* awaited = nullptr) {
  RoundStatus status = carrier.advance(round);
  if (status.state == RoundState::done) return true;
  WarpSpan<A> span(w, call, Event::wait_network, status.peer);
  const uint64_t nothing = 0;  // a round has no flag to report
  WaitClock<A> clock(status.peer);
  while (status.state == RoundState::in_progress) {
    if (awaited) A::post(w, awaited, static_cast<uint64_t>(status.peer));
    if (status.peer != clock.awaited()) clock.charge(w, call, status.peer);
    if (!clock.keep_waiting(w, call, Site::network, &nothing, call.word())) return false;
    status = carrier.advance(round);
  }
  span.set_arg(clock.awaited());
  clock.charge(w, call, clock.awaited());
  return status.state == RoundState::done || record_broken<A>(w, call, status);
}

/// Waits until `flag`, one of the flags in RoundWork, has reached `rounds`. A fault in any warp of this rank also ends the
/// wait.
template <class A>
bool await_rounds(typename A::Warp& w, const CallContext& call, const Rounds& r, uint64_t* flag, int64_t rounds) {
  const auto failed = [&](typename A::Warp&, int) { return A::peek(call.fault_claims) != 0; };
  WarpSpan<A> span(w, call, Event::wait_network, -1);
  return wait_for<A>(
      w, call, 1, [&](int) { return flag; }, flag_word(call.epoch, static_cast<uint64_t>(rounds)), Site::network,
      [&](int) { return static_cast<int>(A::peek(&r.work->awaited.value)); }, span, Wait::brief, failed);
}

/// Announces that this rank has completed `rounds` of the rounds counted by `flag`. Releases everything previously settled.
template <class A>
void publish_rounds(typename A::Warp& w, const CallContext& call, uint64_t* flag, int64_t rounds) {
  A::template store_release<Scope::device>(w, flag, flag_word(call.epoch, static_cast<uint64_t>(rounds)), Site::network);
}

/// The steps of a call in its rounds; any warp may execute them. Template parameter Steps below:
///   bool pack(Warp&, int64_t k, WorkQueue<A>& items)   this warp's share of the outgoing data of round k; settled on return
///   void packed(Warp&, int64_t k)                      the last warp, after all have packed
///   std::span<const Leg> legs(int64_t k)               warp 0
///   bool take(Warp&, int64_t k, WorkQueue<A>& items)   this warp's share of the arrived data; settled on return
///   void took(Warp&, int64_t k)                        the last warp, after all have taken

/// Packs round k; warp 0 also posts it.
template <class A, class Steps>
bool pack_round(typename A::Warp& w, const CallContext& call, const Rounds& r, Steps& steps, int64_t k) {
  RoundWork& work = *r.work;
  const auto slot = static_cast<size_t>(k % kRoundSlots);
  WorkQueue<A> items(&work.pack_next[slot].value);
  if (!steps.pack(w, k, items)) return false;
  if (arrive_is_last<A>(w, &work.pack_done[slot].value)) {
    WorkQueue<A>::reset(w, &work.pack_next[slot].value);
    steps.packed(w, k);
    publish_rounds<A>(w, call, &work.packed.value, k + 1);
  }
  if (w.index() != 0) return true;
  if (!await_rounds<A>(w, call, r, &work.packed.value, k + 1)) return false;
  if (k >= kRoundSlots && !await_rounds<A>(w, call, r, &work.taken.value, k + 1 - kRoundSlots)) return false;
  r.carrier->post(r.first + static_cast<uint64_t>(k), steps.transfers(k), nullptr);
  return true;
}

/// Waits for round k and takes its contents.
template <class A, class Steps>
bool take_round(typename A::Warp& w, const CallContext& call, const Rounds& r, Steps& steps, int64_t k) {
  RoundWork& work = *r.work;
  const auto slot = static_cast<size_t>(k % kRoundSlots);
  if (w.index() == 0) {
    if (!await_round<A>(w, call, *r.carrier, r.first + static_cast<uint64_t>(k), &work.awaited.value)) return false;
    publish_rounds<A>(w, call, &work.arrived.value, k + 1);
  } else if (!await_rounds<A>(w, call, r, &work.arrived.value, k + 1)) {
    return false;
  }
  WorkQueue<A> items(&work.take_next[slot].value);
  if (!steps.take(w, k, items)) return false;
  if (arrive_is_last<A>(w, &work.take_done[slot].value)) {
    WorkQueue<A>::reset(w, &work.take_next[slot].value);
    steps.took(w, k);
    publish_rounds<A>(w, call, &work.taken.value, k + 1);
  }
  return true;
}

/// Packs and posts the first rounds, one per slot.
template <class A, class Steps>
bool begin_rounds(typename A::Warp& w, const CallContext& call, const Rounds& r, Steps& steps) {
  for (int64_t k = 0; k < r.count && k < kRoundSlots; ++k)
    if (!pack_round<A>(w, call, r, steps, k)) return false;
  return true;
}
/// Takes all rounds, and packs those that begin_rounds() has not packed.
template <class A, class Steps>
bool finish_rounds(typename A::Warp& w, const CallContext& call, const Rounds& r, Steps& steps) {
  for (int64_t k = 0; k < r.count; ++k) {
    if (!take_round<A>(w, call, r, steps, k)) return false;
    if (k + kRoundSlots < r.count && !pack_round<A>(w, call, r, steps, k + kRoundSlots)) return false;
  }
  return true;
}

}  // namespace switchyard::detail

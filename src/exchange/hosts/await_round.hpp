// SPDX-License-Identifier: Apache-2.0
// The wait for a round on the CPU, by the thread of the call.
#pragma once

#include "carrier/carrier.hpp"
#include "protocol/wait.hpp"

namespace switchyard::detail {

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

/// Drives the carrier until `round` has been sent and received. Returns false after recording a fault.
template <class A>
bool await_round(typename A::Warp& w, const CallContext& call, Carrier& carrier, uint64_t round) {
  RoundStatus status = carrier.advance(round);
  if (status.state == RoundState::done) return true;
  WarpSpan<A> span(w, call, Event::wait_network, status.peer);
  const uint64_t nothing = 0;  // a round has no flag to report
  WaitClock<A> clock(status.peer);
  while (status.state == RoundState::in_progress) {
    if (status.peer != clock.awaited()) clock.charge(w, call, status.peer);
    if (!clock.keep_waiting(w, call, Site::network, &nothing, call.word())) return false;
    status = carrier.advance(round);
  }
  span.set_arg(clock.awaited());
  clock.charge(w, call, clock.awaited());
  return status.state == RoundState::done || record_broken<A>(w, call, status);
}

}  // namespace switchyard::detail

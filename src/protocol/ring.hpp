// SPDX-License-Identifier: Apache-2.0
// Ring streams and the cooperative loop that drives them.
//
// | flag      | written by | read by  | order           | scope  | reuse              |
// | ring_tail | producer   | consumer | release/acquire | system | epoch, never reset |
// | ring_head | consumer   | producer | release/acquire | system | epoch, never reset |
//
// A ring is empty when a call starts: a producer's stream ends when the consumer has given back all its slots.
// Progress: a warp owns several streams, as producer or consumer, and never blocks on one of them; it polls all in turn. So any
// number of warps per rank, even one, is free of deadlock as long as a ring holds all rows that one token has in one stream.
#pragma once

#include "layout/ring_layout.hpp"
#include "protocol/counts.hpp"

namespace switchyard::detail {

/// Producer's view of one stream (channel, consumer).
template <class A>
struct RingWriter {
  const CallContext* call;
  const RingLayout* rings;
  int channel, consumer;
  int64_t appended = 0;

  /// Slots that may be written now, counted from `appended`.
  SWITCHYARD_FN int64_t room() const {
    const uint64_t word = A::template load_acquire<Scope::system>(head_flag(), Site::ring_head);
    const int64_t consumed = flag_epoch(word) == call->epoch ? static_cast<int64_t>(flag_value(word)) : 0;
    return rings->slots - (appended - consumed);
  }
  /// True once the consumer has given back every appended slot. A stream ends only then: its head flag is in this rank's
  /// segment, and the consumer's last store to it must not come after this rank has left the call and perhaps destroyed the
  /// object.
  SWITCHYARD_FN bool drained() const { return room() == rings->slots; }
  SWITCHYARD_FN const uint64_t* head_flag() const { return call->heap.local(rings->head(channel, consumer)); }
  SWITCHYARD_FN std::byte* next_slot() { return call->heap.at(consumer, rings->slot(channel, call->rank(), appended++)); }
  /// Announces all appended rows; their copies must be settled.
  SWITCHYARD_FN void announce(typename A::Warp& w, bool end) {
    const uint64_t value = static_cast<uint64_t>(appended) | (end ? kRingEnd : 0);
    A::template store_release<Scope::system>(w, call->heap.at(consumer, rings->tail(channel, call->rank())),
                                             flag_word(call->epoch, value), Site::ring_tail);
  }
};

/// Consumer's view of one stream (channel, producer).
template <class A>
struct RingReader {
  const CallContext* call;
  const RingLayout* rings;
  int channel, producer;
  int64_t consumed = 0;
  int64_t released = 0;
  int64_t available = 0;  ///< as last polled
  bool ended = false;

  SWITCHYARD_FN void poll() {
    const uint64_t word = A::template load_acquire<Scope::system>(tail_flag(), Site::ring_tail);
    if (flag_epoch(word) != call->epoch) return;
    available = static_cast<int64_t>(flag_value(word) & (kRingEnd - 1));
    ended = (flag_value(word) & kRingEnd) != 0;
  }
  SWITCHYARD_FN const uint64_t* tail_flag() const { return call->heap.local(rings->tail(channel, producer)); }
  SWITCHYARD_FN const std::byte* slot(int64_t ahead) const {
    return call->heap.local(rings->slot(channel, producer, consumed + ahead));
  }
  SWITCHYARD_FN bool done() const { return ended && consumed == available; }
  /// Gives all consumed slots back; everything read from them must be settled.
  SWITCHYARD_FN void release(typename A::Warp& w) {
    if (released == consumed) return;
    released = consumed;
    A::template store_release<Scope::system>(w, call->heap.at(producer, rings->head(channel, call->rank())),
                                             flag_word(call->epoch, static_cast<uint64_t>(consumed)), Site::ring_head);
  }
};

/// What a warp waits for when none of its streams can move.
struct RingStall {
  Site site = Site::none;
  int peer = 0;
  const uint64_t* flag = nullptr;
};

/// Calls `step(stall)` until it returns 0 streams left. `step` polls every stream of this warp once and sets `progress` if any
/// moved, or else `stall` to one that could not. False after a fault: the deadline counts from the last progress.
template <class A, class Step>
SWITCHYARD_FN bool drive_streams(typename A::Warp& w, const CallContext& call, Step&& step) {
  while (true) {
    RingStall stall;
    bool progress = false;
    int left = step(stall, progress);
    if (left == 0) return true;
    if (progress) continue;
    WaitClock<A> clock(call, stall.peer);
    while (!progress) {
      if (!clock.keep_waiting(w, call, stall.site, stall.flag, call.word())) return false;
      left = step(stall, progress);
      if (left == 0) break;
    }
    clock.charge(w, call, stall.peer);
    if (left == 0) return true;
  }
}

}  // namespace switchyard::detail

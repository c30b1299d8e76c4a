// SPDX-License-Identifier: Apache-2.0
// Ring streams and the polling loop that drives them.
//
// | flag      | written by | read by  | order           | scope  | reuse              |
// | ring_tail | producer   | consumer | release/acquire | system | epoch, never reset |
// | ring_head | consumer   | producer | release/acquire | system | epoch, never reset |
//
// A ring is empty at the start of a call, because a producer's stream ends only after the consumer has released all its slots.
// Progress: a warp owns several streams, each as producer or consumer. It never blocks on one of them but polls each in turn.
// Any number of warps per rank, even one, is therefore free of deadlock, provided that a ring holds all rows of one token in
// one stream and that all warps of all ranks run. On a GPU, all blocks of the launch must be resident at the same time.
#pragma once

#include "layout/ring_layout.hpp"
#include "protocol/counts.hpp"

namespace switchyard::detail {

/// Maximum number of streams per rank in each role.
inline constexpr int kMaxStreams = 1024;

/// State of one side of a stream between two steps. It is in memory used only by the stream's warp, because a warp may own more
/// streams than fit in registers. A step loads it once, works on a copy, and stores it back (keep) before the settle that ends
/// the step.
struct RingStream {
  int64_t moved = 0;          ///< rows appended, or consumed
  int64_t available = 0;      ///< consumer: rows available at the last poll
  int64_t released = 0;       ///< consumer: rows released
  int64_t next = 0, end = 0;  ///< producer: tokens or records to append; consumer of a channel: tokens to sum
  int32_t k = 0;              ///< producer of routes: next route of record `next`
  bool open = true;           ///< producer: something is left to append
  bool ended = false;         ///< consumer: the producer will append no more rows
  bool done = false;          ///< no work is left on either side
};

/// Stores a stream's state. The stores are pending on return.
template <class A>
SWITCHYARD_FN void keep(typename A::Warp& w, RingStream& to, const RingStream& from) {
  A::for_lanes(w, 1, [&](int) { to = from; });
}

/// Ends a stream.
template <class A>
SWITCHYARD_FN void finish(typename A::Warp& w, RingStream& kept, RingStream s) {
  s.done = true;
  keep<A>(w, kept, s);
  A::settle(w);
}

/// Producer's view of one stream (channel, consumer).
template <class A>
struct RingWriter {
  const CallContext* call;
  const RingLayout* rings;
  int channel, consumer;
  RingStream s;

  /// Number of slots that may now be written, counting from `s.moved`.
  SWITCHYARD_FN int64_t free_slots() const {
    const uint64_t word = A::template load_acquire<Scope::system>(head_flag(), Site::ring_head);
    const int64_t consumed = flag_epoch(word) == call->epoch ? static_cast<int64_t>(flag_value(word)) : 0;
    return rings->slots - (s.moved - consumed);
  }
  /// True once the consumer has released every appended slot. A stream ends only then: its head flag is in this rank's segment,
  /// and the consumer must not store to it after this rank has returned from the call, because the object may then be
  /// destroyed.
  SWITCHYARD_FN bool drained() const { return free_slots() == rings->slots; }
  SWITCHYARD_FN const uint64_t* head_flag() const { return call->heap.local(rings->head(channel, consumer)); }
  SWITCHYARD_FN std::byte* next_slot() { return call->heap.at(consumer, rings->slot(channel, call->rank(), s.moved++)); }
  /// Announces all appended rows. Their copies must have settled.
  SWITCHYARD_FN void announce(typename A::Warp& w, bool end) {
    const uint64_t value = static_cast<uint64_t>(s.moved) | (end ? kRingEnd : 0);
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
  RingStream s;

  SWITCHYARD_FN void poll() {
    const uint64_t word = A::template load_acquire<Scope::system>(tail_flag(), Site::ring_tail);
    if (flag_epoch(word) != call->epoch) return;
    s.available = static_cast<int64_t>(flag_value(word) & (kRingEnd - 1));
    s.ended = (flag_value(word) & kRingEnd) != 0;
  }
  SWITCHYARD_FN const uint64_t* tail_flag() const { return call->heap.local(rings->tail(channel, producer)); }
  SWITCHYARD_FN const std::byte* slot(int64_t ahead) const {
    return call->heap.local(rings->slot(channel, producer, s.moved + ahead));
  }
  /// Releases all consumed slots. All reads from them must have settled.
  SWITCHYARD_FN void release(typename A::Warp& w) const {
    A::template store_release<Scope::system>(w, call->heap.at(producer, rings->head(channel, call->rank())),
                                             flag_word(call->epoch, static_cast<uint64_t>(s.moved)), Site::ring_head);
  }
};

/// The flag that a warp waits for when none of its streams can proceed.
struct RingStall {
  Site site = Site::none;
  int peer = 0;
  const uint64_t* flag = nullptr;
};

/// Calls `step(stall, progress)`, which returns the number of streams left, until it returns 0. `step` polls every stream of
/// this warp once. It sets `progress` if any stream advanced, and otherwise sets `stall` to one that could not. Returns false
/// after a fault; the deadline is measured from the last progress.
template <class A, class Step>
SWITCHYARD_FN bool drive_streams(typename A::Warp& w, const CallContext& call, Step&& step) {
  while (true) {
    RingStall stall;
    bool progress = false;
    int left = step(stall, progress);
    if (left == 0) return true;
    if (progress) continue;
    WaitClock<A> clock(stall.peer);
    WarpSpan<A> span(w, call, Event::wait_ring, stall.peer);
    uint64_t tried = 0;
    while (!progress) {
      if (!clock.keep_waiting(w, call, stall.site, stall.flag, call.word())) return false;
      tried = span.mark();
      left = step(stall, progress);
      if (left == 0) break;
    }
    span.close(tried);
    clock.charge(w, call, stall.peer);
    if (left == 0) return true;
  }
}

}  // namespace switchyard::detail

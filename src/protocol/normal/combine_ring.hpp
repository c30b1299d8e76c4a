// SPDX-License-Identifier: Apache-2.0
// Combine through rings: each expert rank streams its rows (or partial sums) to the tokens' owners in token order. An owner
// sums a token as soon as all its rows have arrived. The order of the sum, and hence the bits, are the same as in combine_pull.
// Flags, reuse and progress: protocol/normal/ring.hpp.
#pragma once

#include "protocol/normal/combine_pull.hpp"
#include "protocol/normal/dispatch_ring.hpp"

namespace switchyard::detail {

/// Trivially copyable.
struct RingCombineParams {
  CombineParams c;  ///< staging and placement are unused
  RingLayout rings;
  /// [2 * num_rings + num_channels] the producers (of this rank's rows for one owner's tokens of one channel), the consumers
  /// (by channel, then rank), and the state of each channel of this rank's tokens. Need not be initialized.
  RingStream* streams = nullptr;
  int send_chunk = 1;

  /// [W] the streams into a channel of this rank's tokens.
  SWITCHYARD_FN RingStream* readers(int channel) const {
    return streams + rings.num_rings() + static_cast<int64_t>(channel) * rings.world;
  }
  SWITCHYARD_FN RingStream& channel(int index) const { return streams[2 * rings.num_rings() + index]; }
};

/// Appends the next row of record ring.s.next. Returns false if there is none, because all its rows were dropped or all routes
/// have been sent.
template <class A>
SWITCHYARD_FN bool append_output(typename A::Warp& w, const RingCombineParams& p, RingWriter<A>& ring) {
  const CombineParams& c = p.c;
  RingStream& s = ring.s;
  const int32_t* routes = c.tables.record_route + s.next * c.shape.topk;
  if (c.shape.layout == Layout::rank_major) {
    if (s.k > 0) return false;
    s.k = 1;
    std::byte* slot = ring.next_slot();
    A::copy(w, slot, c.shape.y + s.next * c.shape.row_bytes, static_cast<size_t>(c.shape.row_bytes));
    if (c.shape.weights_in)
      A::copy(w, slot + p.rings.record_at(), c.shape.weights_in + s.next * c.shape.topk, size_t{4} * c.shape.topk);
    return true;
  }
  if (c.shape.order == CombineOrder::per_route) {
    while (s.k < c.shape.topk && routes[s.k] < 0) ++s.k;
    if (s.k == c.shape.topk) return false;
    A::copy(w, ring.next_slot(), c.shape.y + routes[s.k++] * c.shape.row_bytes, static_cast<size_t>(c.shape.row_bytes));
    return true;
  }
  if (s.k > 0) return false;
  s.k = 1;
  const bool any = A::lanes_where(w, c.shape.topk, [&](int k) { return routes[k] >= 0; }) != 0;
  return any && reduce_record<A>(w, c, s.next, ring.next_slot());
}

/// Appends up to one chunk. Returns true if anything was announced.
template <class A>
SWITCHYARD_FN bool produce(typename A::Warp& w, const RingCombineParams& p, RingWriter<A>& ring, RingStream& kept) {
  WarpSpan<A> span(w, p.c.call, Event::ring_send);
  RingStream& s = ring.s;
  int64_t free_slots = ring.free_slots();
  free_slots = free_slots < p.send_chunk ? free_slots : p.send_chunk;
  const int64_t before = s.moved;
  while (s.next < s.end && s.moved - before < free_slots) {
    if (append_output<A>(w, p, ring)) continue;
    ++s.next;
    s.k = 0;
  }
  s.open = s.next < s.end;
  span.set_arg(s.moved - before);
  if (ring.consumer != p.c.call.rank()) span.set_bytes(static_cast<uint64_t>((s.moved - before) * p.c.shape.row_bytes));
  if (s.moved == before) span.cancel();
  if (s.open && s.moved == before) return false;
  keep<A>(w, kept, s);
  A::settle(w);
  ring.announce(w, !s.open);
  return true;
}

/// True once no producer will store to a tail of this channel again; this rank may then leave the call and destroy the object.
template <class A>
SWITCHYARD_FN bool streams_ended(const RingCombineParams& p, int channel, RingStall& stall) {
  for (int r = 0; r < p.c.call.world(); ++r) {
    RingReader<A> reader{&p.c.call, &p.rings, channel, r, p.readers(channel)[r]};
    if (!reader.s.ended) reader.poll();
    if (reader.s.ended) continue;
    stall = {Site::ring_tail, r, reader.tail_flag()};
    return false;
  }
  return true;
}

/// Sums token `t` and consumes its rows if all have arrived. Otherwise, sets `stall` to the missing row and returns false.
template <class A>
SWITCHYARD_FN bool sum_token(typename A::Warp& w, const RingCombineParams& p, int channel, int64_t t, RingStall& stall,
                             MoveCounter& moved) {
  const CombineParams& c = p.c;
  const TokenRows rows = rows_of(c, t);
  RingStream* const readers = p.readers(channel);
  // Rows from one rank arrive in the order of k.
  const auto ahead = [&](int i) {
    int64_t n = 0;
    for (int j = 0; rows.by_route && j < i; ++j) n += rows.rank(j) == rows.rank(i) ? 1 : 0;
    return n;
  };
  const auto absent = [&](int i) {
    const int r = rows.rank(i);
    return r >= 0 && readers[r].moved + ahead(i) >= readers[r].available;
  };
  while (const uint64_t missing = A::lanes_where(w, rows.places, absent)) {
    int first = 0;
    while ((missing >> first & 1) == 0) ++first;
    const int r = rows.rank(first);
    RingReader<A> reader{&c.call, &p.rings, channel, r, readers[r]};
    const int64_t known = reader.s.available;
    reader.poll();
    stall = {Site::ring_tail, r, reader.tail_flag()};
    if (reader.s.available == known) return false;
    keep<A>(w, readers[r], reader.s);
    A::settle(w);
  }
  const auto slot_of = [&](int i) -> const std::byte* {
    const int r = rows.rank(i);
    return r < 0 ? nullptr : c.call.heap.local(p.rings.slot(channel, r, readers[r].moved + ahead(i)));
  };
  const auto weights_of = [&](int i) -> const void* {
    const std::byte* slot = slot_of(i);
    return slot ? slot + p.rings.record_at() : nullptr;
  };
  sum_rows<A>(w, c, t, rows, slot_of, weights_of, moved, {0, c.shape.row_bytes});
  A::settle(w);  // slots have been read
  A::for_lanes(w, c.call.world(), [&](int r) {
    for (int i = 0; i < rows.places; ++i) readers[r].moved += rows.rank(i) == r ? 1 : 0;
  });
  A::settle(w);
  return true;
}

/// Sums up to one chunk of a channel's tokens. Returns true if any token was summed.
template <class A>
SWITCHYARD_FN bool consume(typename A::Warp& w, const RingCombineParams& p, int channel, RingStall& stall, MoveCounter& moved) {
  WarpSpan<A> span(w, p.c.call, Event::ring_receive);
  const RingStream& kept = p.channel(channel);
  RingStream s = kept;
  const int64_t before = s.next;
  const uint64_t rows_before = moved.payload_rows;
  while (s.next < s.end && s.next - before < p.send_chunk && sum_token<A>(w, p, channel, s.next, stall, moved)) ++s.next;
  span.set_arg(static_cast<int64_t>(moved.payload_rows - rows_before));
  if (s.next == before) {
    span.cancel();
    return false;
  }
  keep<A>(w, p.channel(channel), s);
  for (int r = 0; r < p.c.call.world(); ++r) {
    RingReader<A> reader{&p.c.call, &p.rings, channel, r, p.readers(channel)[r]};
    if (reader.s.released == reader.s.moved) continue;
    reader.release(w);
    reader.s.released = reader.s.moved;
    keep<A>(w, p.readers(channel)[r], reader.s);
  }
  A::settle(w);
  return true;
}

/// Initializes the streams and channels of this warp. No other warp uses them.
template <class A>
SWITCHYARD_FN void open_streams(typename A::Warp& w, const RingCombineParams& p) {
  const int world = p.c.call.world(), channels = p.rings.num_channels;
  for (int i = w.index(); i < channels * world; i += w.total()) {
    const int channel = i / world, owner = (i + p.c.call.rank()) % world;
    RingStream s;
    s.next = first_record_of(p.c, owner, channel_begin(p.c.tables.tokens_of[owner], channels, channel));
    s.end = first_record_of(p.c, owner, channel_begin(p.c.tables.tokens_of[owner], channels, channel + 1));
    keep<A>(w, p.streams[i], s);
  }
  for (int channel = w.index(); channel < channels; channel += w.total()) {
    RingStream s;
    A::for_lanes(w, world, [&](int r) { p.readers(channel)[r] = s; });
    s.next = channel_begin(p.c.tokens, channels, channel);
    s.end = channel_begin(p.c.tokens, channels, channel + 1);
    keep<A>(w, p.channel(channel), s);
  }
  A::settle(w);
}

/// Kernel body: run by all warps of a rank. Producer streams and consumer channels are assigned to the warps round-robin.
/// Returns false after recording a fault. The call is complete when all warps have returned.
template <class A>
SWITCHYARD_FN bool combine_ring_kernel(typename A::Warp& w, const RingCombineParams& p) {
  const CallContext& call = p.c.call;
  const int world = call.world(), channels = p.rings.num_channels;
  open_streams<A>(w, p);
  MoveCounter moved;
  const bool ok = drive_streams<A>(w, call, [&](RingStall& stall, bool& progress) {
    int left = 0;
    for (int i = w.index(); i < channels * world; i += w.total()) {
      RingStream& kept = p.streams[i];
      if (kept.done) continue;
      ++left;
      RingWriter<A> ring{&call, &p.rings, i / world, (i + call.rank()) % world, kept};
      if (ring.s.open && produce<A>(w, p, ring, kept)) progress = true;
      stall = {Site::ring_head, ring.consumer, ring.head_flag()};
      if (ring.s.open || !ring.drained()) continue;
      finish<A>(w, kept, ring.s);
      progress = true;
    }
    for (int channel = w.index(); channel < channels; channel += w.total()) {
      RingStream& kept = p.channel(channel);
      if (kept.done) continue;
      ++left;
      if (kept.next < kept.end && consume<A>(w, p, channel, stall, moved)) progress = true;
      if (kept.next < kept.end || !streams_ended<A>(p, channel, stall)) continue;
      finish<A>(w, kept, kept);
      progress = true;
    }
    return left;
  });
  if (!ok) return false;
  A::settle(w);
  call.moved[w.index()] = moved;
  return true;
}

}  // namespace switchyard::detail

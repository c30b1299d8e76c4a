// SPDX-License-Identifier: Apache-2.0
// Dispatch through rings: rows pass through bounded symmetric memory and end in the receiver's private memory, at the same rows
// as with direct dispatch. Flags, reuse and progress: protocol/ring.hpp.
#pragma once

#include "protocol/dispatch_direct.hpp"
#include "protocol/ring.hpp"

namespace switchyard::detail {

/// Trivially copyable.
struct RingDispatchParams {
  DispatchParams d;  ///< placements are not used; the block is `mine`
  RingLayout rings;
  Destination mine;  ///< private memory
  int send_chunk = 1;
};

/// Streams that one warp may own in one role; more streams than warps * kMaxStreams are refused when the object is made.
inline constexpr int kMaxStreams = 1024;

template <class A>
struct DispatchProducer {
  RingWriter<A> ring;
  int64_t token, end;
  bool open = true;   ///< rows are left to append
  bool done = false;  ///< ended and drained
};

/// Puts token t's row, scales and record into the next slot.
template <class A>
SWITCHYARD_FN void append_token(typename A::Warp& w, const RingDispatchParams& p, RingWriter<A>& ring, int64_t t,
                                const SendEntry& e, MoveCounter& moved) {
  const DispatchParams& d = p.d;
  std::byte* slot = ring.next_slot();
  auto* head = reinterpret_cast<RingRecord*>(slot + p.rings.record_at());
  auto* route = reinterpret_cast<int32_t*>(head + 1);
  auto* weight = reinterpret_cast<float*>(route + d.topk);
  A::for_lanes(w, d.topk, [&](int k) { write_route(d, t, k, e.rank, route + k, weight + k); });
  A::for_lanes(w, 1, [&](int) { *head = RingRecord{e.record, static_cast<int32_t>(t), {0, 0}}; });
  moved.metadata_bytes += sizeof(RingRecord) + static_cast<uint64_t>(8 * d.topk);
  if (e.row < 0) return;
  const std::byte* row = d.x + t * d.src_row_bytes;
  if (d.quantize != ScaleKind::none) {
    A::quantize_row(w, reinterpret_cast<uint8_t*>(slot), slot + p.rings.scale_at(), row, d.src_type, d.hidden, d.quantize);
  } else {
    A::copy(w, slot, row, static_cast<size_t>(d.row_bytes));
    if (d.scales) A::copy(w, slot + p.rings.scale_at(), d.scales + t * d.scale_bytes, static_cast<size_t>(d.scale_bytes));
  }
  (e.rank == d.call.rank() ? moved.local_bytes : moved.remote_bytes) += static_cast<uint64_t>(d.row_bytes + d.scale_bytes);
  ++moved.rows;
}

/// Appends up to one chunk. Returns whether anything was announced.
template <class A>
SWITCHYARD_FN bool produce(typename A::Warp& w, const RingDispatchParams& p, DispatchProducer<A>& s, MoveCounter& moved) {
  int64_t room = s.ring.room();
  room = room < p.send_chunk ? room : p.send_chunk;
  const int64_t before = s.ring.appended;
  while (s.token < s.end) {
    const SendEntry* entry = nullptr;
    const SendEntry* entries = p.d.sends.of(s.token);
    const int places = p.d.sends.places(s.token);
    for (int i = 0; i < places; ++i)
      if (entries[i].rank == s.ring.consumer) entry = &entries[i];
    if (entry) {
      if (room == 0) break;
      append_token<A>(w, p, s.ring, s.token, *entry, moved);
      --room;
    }
    ++s.token;
  }
  s.open = s.token < s.end;
  if (s.open && s.ring.appended == before) return false;
  A::settle(w);
  s.ring.announce(w, !s.open);
  return true;
}

/// Places the row in `slot` at its rows of the output and files its record.
template <class A>
SWITCHYARD_FN void place_row(typename A::Warp& w, const RingDispatchParams& p, const std::byte* slot, MoveCounter& moved) {
  const DispatchParams& d = p.d;
  const auto* head = reinterpret_cast<const RingRecord*>(slot + p.rings.record_at());
  const auto* route = reinterpret_cast<const int32_t*>(head + 1);
  const auto* weight = reinterpret_cast<const float*>(route + d.topk);
  const int64_t record = head->record;
  void* row_to[kMaxTopk];
  void* scale_to[kMaxTopk];
  int n = 0;
  auto to = [&](int64_t row) {
    row_to[n] = p.mine.block + row * d.row_bytes;
    scale_to[n++] = p.mine.block + p.mine.layout.scales_at() + row * d.scale_bytes;
  };
  if (d.layout == Layout::rank_major) {
    to(record);
  } else {
    for (int k = 0; k < d.topk; ++k)
      if (route[k] >= 0) to(route[k]);
  }
  if (n > 0) {
    A::multicast_copy(w, row_to, n, slot, static_cast<size_t>(d.row_bytes));
    if (d.scale_bytes) A::multicast_copy(w, scale_to, n, slot + p.rings.scale_at(), static_cast<size_t>(d.scale_bytes));
    moved.copied_bytes += static_cast<uint64_t>(n * (d.row_bytes + d.scale_bytes));
  }
  if (!d.with_records) return;
  int32_t* token_out = p.mine.token() + record;
  int32_t* route_out = p.mine.route() + record * d.topk;
  float* weight_out = p.mine.weight() + record * d.topk;
  A::for_lanes(w, d.topk, [&](int k) {
    route_out[k] = route[k];
    weight_out[k] = weight[k];  // a rank without tokens has no weights of its own, but receives others
    if (k == 0) *token_out = head->token;
  });
}

/// Takes what is there, at most one chunk. Returns whether any row was taken or the stream ended.
template <class A>
SWITCHYARD_FN bool consume(typename A::Warp& w, const RingDispatchParams& p, RingReader<A>& s, MoveCounter& moved) {
  const bool was_ended = s.ended;
  s.poll();
  const int64_t ready = s.available - s.consumed, n = ready < p.send_chunk ? ready : p.send_chunk;
  if (n == 0) return s.ended && !was_ended;
  for (int64_t i = 0; i < n; ++i) place_row<A>(w, p, s.slot(i), moved);
  A::settle(w);
  s.consumed += n;
  s.release(w);
  return true;
}

/// Kernel body: run by all warps of a rank. Stream (channel, peer, role) number i belongs to warp i mod total().
template <class A>
SWITCHYARD_FN void dispatch_ring(typename A::Warp& w, const RingDispatchParams& p) {
  const CallContext& call = p.d.call;
  DispatchProducer<A> producers[kMaxStreams];
  RingReader<A> readers[kMaxStreams];
  int num_producers = 0, num_readers = 0;
  const int64_t streams = p.rings.num_rings();
  for (int64_t i = w.index(); i < 2 * streams; i += w.total()) {
    const int channel = static_cast<int>(i % streams) / call.world();
    const int peer = (static_cast<int>(i % streams) + call.rank()) % call.world();
    if (i < streams) {
      producers[num_producers++] = DispatchProducer<A>{{&call, &p.rings, channel, peer},
                                                       channel_begin(p.d.tokens, p.rings.num_channels, channel),
                                                       channel_begin(p.d.tokens, p.rings.num_channels, channel + 1)};
    } else {
      readers[num_readers++] = RingReader<A>{&call, &p.rings, channel, peer};
    }
  }
  MoveCounter moved;
  zero_padding<A>(w, p.d, p.mine);
  const bool ok = drive_streams<A>(w, call, [&](RingStall& stall, bool& progress) {
    int left = 0;
    for (int i = 0; i < num_producers; ++i) {
      DispatchProducer<A>& s = producers[i];
      if (s.done) continue;
      if (s.open && produce<A>(w, p, s, moved)) progress = true;
      s.done = !s.open && s.ring.drained();
      if (s.done) {
        progress = true;
        continue;
      }
      ++left;
      stall = {Site::ring_head, s.ring.consumer, s.ring.head_flag()};
    }
    for (int i = 0; i < num_readers; ++i) {
      RingReader<A>& s = readers[i];
      if (s.done()) continue;
      if (consume<A>(w, p, s, moved)) progress = true;
      if (s.done()) continue;
      ++left;
      stall = {Site::ring_tail, s.producer, s.tail_flag()};
    }
    return left;
  });
  if (!ok) return;
  A::settle(w);
  call.moved[w.index()] = moved;
}

}  // namespace switchyard::detail

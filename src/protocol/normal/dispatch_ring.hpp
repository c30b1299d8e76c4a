// SPDX-License-Identifier: Apache-2.0
// Dispatch through rings: rows pass through bounded symmetric memory and end up in the receiver's private memory, in the same
// order as in direct dispatch. Flags, reuse and progress: protocol/normal/ring.hpp.
#pragma once

#include "protocol/normal/dispatch_direct.hpp"
#include "protocol/normal/ring.hpp"

namespace switchyard::detail {

/// Trivially copyable.
struct RingDispatchParams {
  DispatchParams d;  ///< placements are unused; the block is `mine`
  RingLayout rings;
  Destination mine;               ///< private memory
  RingStream* streams = nullptr;  ///< [2 * num_rings] producers, then consumers; need not be initialized
  int send_chunk = 1;
};

/// Writes token t's row, scales and record to the next slot.
template <class A>
SWITCHYARD_FN void append_token(typename A::Warp& w, const RingDispatchParams& p, RingWriter<A>& ring, int64_t t,
                                const SendEntry& e, MoveCounter& moved) {
  const DispatchParams& d = p.d;
  std::byte* slot = ring.next_slot();
  auto* head = reinterpret_cast<RingRecord*>(slot + p.rings.record_at());
  auto* route = reinterpret_cast<int32_t*>(head + 1);
  auto* weight = reinterpret_cast<float*>(route + d.shape.topk);
  A::for_lanes(w, d.shape.topk, [&](int k) { write_route(d, t, k, e.rank, route + k, weight + k); });
  A::for_lanes(w, 1, [&](int) { *head = RingRecord{e.record, static_cast<int32_t>(t), {0, 0}}; });
  moved.metadata_bytes += sizeof(RingRecord) + static_cast<uint64_t>(8 * d.shape.topk);
  if (e.row < 0) return;
  const std::byte* row = d.shape.x + t * d.shape.src_row_bytes;
  if (d.shape.quantize != ScaleKind::none) {
    A::quantize_row(w, reinterpret_cast<uint8_t*>(slot), slot + p.rings.scale_at(), row, d.shape.src_type, d.shape.hidden,
                    d.shape.quantize);
  } else {
    A::copy(w, slot, row, static_cast<size_t>(d.shape.row_bytes));
    if (d.shape.scales)
      A::copy(w, slot + p.rings.scale_at(), d.shape.scales + t * d.shape.scale_bytes, static_cast<size_t>(d.shape.scale_bytes));
  }
  (e.rank == d.call.rank() ? moved.local_bytes : moved.remote_bytes) +=
      static_cast<uint64_t>(d.shape.row_bytes + d.shape.scale_bytes);
  ++moved.payload_rows;
}

/// Appends up to one chunk. Returns true if anything was announced.
template <class A>
SWITCHYARD_FN bool produce(typename A::Warp& w, const RingDispatchParams& p, RingWriter<A>& ring, RingStream& kept,
                           MoveCounter& moved) {
  WarpSpan<A> span(w, p.d.call, Event::ring_send);
  RingStream& s = ring.s;
  int64_t free_slots = ring.free_slots();
  free_slots = free_slots < p.send_chunk ? free_slots : p.send_chunk;
  const int64_t before = s.moved;
  const uint64_t bytes_before = moved.remote_bytes;
  while (s.next < s.end) {
    const SendEntry* entry = nullptr;
    const SendEntry* entries = p.d.tables.sends.of(s.next);
    const int places = p.d.tables.sends.places(s.next);
    for (int i = 0; i < places; ++i)
      if (entries[i].rank == ring.consumer) entry = &entries[i];
    if (entry) {
      if (free_slots == 0) break;
      append_token<A>(w, p, ring, s.next, *entry, moved);
      --free_slots;
    }
    ++s.next;
  }
  s.open = s.next < s.end;
  span.set_arg(s.moved - before);
  span.set_bytes(moved.remote_bytes - bytes_before);
  if (s.moved == before) span.cancel();
  if (s.open && s.moved == before) return false;
  keep<A>(w, kept, s);
  A::settle(w);
  ring.announce(w, !s.open);
  return true;
}

/// Copies the row in `slot` to its output rows and stores its record.
template <class A>
SWITCHYARD_FN void place_row(typename A::Warp& w, const RingDispatchParams& p, int source, const std::byte* slot,
                             MoveCounter& moved) {
  const DispatchParams& d = p.d;
  const auto* head = reinterpret_cast<const RingRecord*>(slot + p.rings.record_at());
  const auto* route = reinterpret_cast<const int32_t*>(head + 1);
  const auto* weight = reinterpret_cast<const float*>(route + d.shape.topk);
  const int64_t record = head->record;
  const bool rank_major = d.shape.layout == Layout::rank_major;
  const int places = rank_major ? 1 : d.shape.topk;
  const auto row_of = [&](int k) -> int64_t { return rank_major ? record : route[k]; };
  const auto row_to = [&](int k) -> void* { return row_of(k) >= 0 ? p.mine.block + row_of(k) * d.shape.row_bytes : nullptr; };
  A::multicast_to(w, places, row_to, slot, static_cast<size_t>(d.shape.row_bytes));
  if (d.shape.scale_bytes) {
    std::byte* scales = p.mine.block + p.mine.layout.scales_at();
    const auto scale_to = [&](int k) -> void* { return row_of(k) >= 0 ? scales + row_of(k) * d.shape.scale_bytes : nullptr; };
    A::multicast_to(w, places, scale_to, slot + p.rings.scale_at(), static_cast<size_t>(d.shape.scale_bytes));
  }
  const auto rows = static_cast<uint64_t>(bits(A::lanes_where(w, places, [&](int k) { return row_of(k) >= 0; })));
  moved.copied_bytes += rows * static_cast<uint64_t>(d.shape.row_bytes + d.shape.scale_bytes);
  if (!d.shape.with_records) return;
  int32_t* token_out = p.mine.token() + record;
  int32_t* route_out = p.mine.route() + record * d.shape.topk;
  float* weight_out = p.mine.weight() + record * d.shape.topk;
  A::for_lanes(w, d.shape.topk, [&](int k) {
    route_out[k] = route[k];
    weight_out[k] = weight[k];  // a rank without tokens passes no weights, but receives those of other ranks
    if (k == 0) *token_out = head->token;
    if (d.tables.row_source && route[k] >= 0) {
      d.tables.row_source[route[k]] = pack_source(source, k, head->token);
      d.tables.row_weight[route[k]] = weight[k];
    }
  });
}

/// Consumes available rows, up to one chunk. Returns true if any row was consumed or the stream ended.
template <class A>
SWITCHYARD_FN bool consume(typename A::Warp& w, const RingDispatchParams& p, RingReader<A>& ring, RingStream& kept,
                           MoveCounter& moved) {
  WarpSpan<A> span(w, p.d.call, Event::ring_receive);
  RingStream& s = ring.s;
  ring.poll();
  const int64_t ready = s.available - s.moved, n = ready < p.send_chunk ? ready : p.send_chunk;
  span.set_arg(n);
  if (n == 0) span.cancel();
  for (int64_t i = 0; i < n; ++i) place_row<A>(w, p, ring.producer, ring.slot(i), moved);
  s.moved += n;
  s.done = s.ended && s.moved == s.available;
  if (n == 0 && !s.done) return false;
  keep<A>(w, kept, s);
  A::settle(w);
  if (n > 0) ring.release(w);
  return true;
}

/// Kernel body: run by all warps of a rank. Stream (channel, peer, role) number i belongs to warp i mod total(). Returns false
/// after recording a fault. The call is complete when all warps have returned.
template <class A>
SWITCHYARD_FN bool dispatch_ring(typename A::Warp& w, const RingDispatchParams& p) {
  const CallContext& call = p.d.call;
  const int world = call.world(), channels = p.rings.num_channels;
  const int streams = channels * world;
  const auto channel_of = [&](int i) { return i % streams / world; };
  const auto peer_of = [&](int i) { return (i % streams + call.rank()) % world; };
  for (int i = w.index(); i < 2 * streams; i += w.total()) {
    RingStream s;
    s.next = channel_begin(p.d.tokens, channels, channel_of(i));
    s.end = channel_begin(p.d.tokens, channels, channel_of(i) + 1);
    keep<A>(w, p.streams[i], s);
  }
  MoveCounter moved;
  zero_padding<A>(w, p.d, p.mine, share_of_blocks(w, 0, w.num_blocks()));
  A::settle(w);
  const bool ok = drive_streams<A>(w, call, [&](RingStall& stall, bool& progress) {
    int left = 0;
    for (int i = w.index(); i < 2 * streams; i += w.total()) {
      RingStream& kept = p.streams[i];
      if (kept.done) continue;
      ++left;
      if (i >= streams) {
        RingReader<A> ring{&call, &p.rings, channel_of(i), peer_of(i), kept};
        if (consume<A>(w, p, ring, kept, moved)) progress = true;
        stall = {Site::ring_tail, ring.producer, ring.tail_flag()};
        continue;
      }
      RingWriter<A> ring{&call, &p.rings, channel_of(i), peer_of(i), kept};
      if (ring.s.open && produce<A>(w, p, ring, kept, moved)) progress = true;
      stall = {Site::ring_head, ring.consumer, ring.head_flag()};
      if (ring.s.open || !ring.drained()) continue;
      finish<A>(w, kept, ring.s);
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

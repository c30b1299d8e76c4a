// SPDX-License-Identifier: Apache-2.0
// Combine through rings: each expert rank streams its rows (or partial sums) to the tokens' owners in token order; an owner
// sums a token as soon as all its rows have arrived. Same order of the sum, hence the same bits, as combine_pull. Flags, reuse,
// progress: protocol/ring.hpp.
#pragma once

#include "protocol/combine_pull.hpp"
#include "protocol/dispatch_ring.hpp"

namespace switchyard::detail {

/// Trivially copyable.
struct RingCombineParams {
  CombineParams c;  ///< staging and placement are not used
  RingLayout rings;
  const int64_t* record_begin = nullptr;  ///< [W + 1] this rank's records by owner
  const int32_t* record_token = nullptr;  ///< [records]
  const int64_t* tokens_of = nullptr;     ///< [W] tokens of each owner
  int send_chunk = 1;
};

/// Stream of this rank's rows to the tokens of one channel of one owner.
template <class A>
struct CombineProducer {
  RingWriter<A> ring;
  int64_t record, end;
  int k = 0;          ///< per_route: next route of `record`
  bool open = true;   ///< rows are left to append
  bool done = false;  ///< ended and drained
};

/// First record of `owner` whose token is at least `token`. Records of one owner have ascending tokens.
SWITCHYARD_FN inline int64_t first_record_of(const RingCombineParams& p, int owner, int64_t token) {
  int64_t low = p.record_begin[owner], high = p.record_begin[owner + 1];
  while (low < high) {
    const int64_t mid = low + (high - low) / 2;
    if (p.record_token[mid] < token)
      low = mid + 1;
    else
      high = mid;
  }
  return low;
}

/// Appends what record s.record sends next. Returns false if that is nothing (all its rows were dropped, or all routes are
/// sent).
template <class A>
SWITCHYARD_FN bool append_output(typename A::Warp& w, const RingCombineParams& p, CombineProducer<A>& s) {
  const CombineParams& c = p.c;
  const int32_t* routes = c.record_route + s.record * c.topk;
  if (c.layout == Layout::rank_major) {
    if (s.k > 0) return false;
    s.k = 1;
    std::byte* slot = s.ring.next_slot();
    A::copy(w, slot, c.y + s.record * c.row_bytes, static_cast<size_t>(c.row_bytes));
    if (c.weights_in) A::copy(w, slot + p.rings.record_at(), c.weights_in + s.record * c.topk, size_t{4} * c.topk);
    return true;
  }
  if (c.order == CombineOrder::per_route) {
    while (s.k < c.topk && routes[s.k] < 0) ++s.k;
    if (s.k == c.topk) return false;
    A::copy(w, s.ring.next_slot(), c.y + routes[s.k++] * c.row_bytes, static_cast<size_t>(c.row_bytes));
    return true;
  }
  if (s.k > 0) return false;
  s.k = 1;
  const bool any = A::lanes_where(w, c.topk, [&](int k) { return routes[k] >= 0; }) != 0;
  return any && reduce_record<A>(w, c, s.record, s.ring.next_slot());
}

/// Appends up to one chunk. Returns whether anything was announced.
template <class A>
SWITCHYARD_FN bool produce(typename A::Warp& w, const RingCombineParams& p, CombineProducer<A>& s) {
  int64_t room = s.ring.room();
  room = room < p.send_chunk ? room : p.send_chunk;
  const int64_t before = s.ring.appended;
  while (s.record < s.end && s.ring.appended - before < room) {
    if (append_output<A>(w, p, s)) continue;
    ++s.record;
    s.k = 0;
  }
  s.open = s.record < s.end;
  if (s.open && s.ring.appended == before) return false;
  A::settle(w);
  s.ring.announce(w, !s.open);
  return true;
}

/// One channel of this rank's tokens; readers[r] is the stream from rank r.
template <class A>
struct CombineConsumer {
  int64_t token, end;
  RingReader<A>* readers;
  bool done = false;  ///< all tokens are summed and all streams have ended
};

/// True once no producer will store to a tail of this channel any more: this rank may then leave the call and destroy the
/// object.
template <class A>
SWITCHYARD_FN bool streams_ended(const RingCombineParams& p, CombineConsumer<A>& s, RingStall& stall) {
  for (int r = 0; r < p.c.call.world(); ++r) {
    RingReader<A>& reader = s.readers[r];
    if (!reader.ended) reader.poll();
    if (reader.ended) continue;
    stall = {Site::ring_tail, r, reader.tail_flag()};
    return false;
  }
  return true;
}

/// The sum of token t from its n rows, and of its weights if asked for. Pending.
template <class A>
SWITCHYARD_FN void sum_rows(typename A::Warp& w, const CombineParams& p, int64_t t, const void* const* rows,
                            const float* weights, const void* const* weight_rows, int n) {
  const bool weighted = p.layout == Layout::expert_major && p.order == CombineOrder::per_route && p.weights;
  const void* bias0 = p.bias[0] ? p.bias[0] + t * p.row_bytes : nullptr;
  const void* bias1 = p.bias[1] ? p.bias[1] + t * p.row_bytes : nullptr;
  A::reduce_rows(w,
                 ReduceSpec{p.out + t * p.row_bytes, rows, weighted ? weights : nullptr, n, {bias0, bias1}, p.type, p.hidden});
  if (p.out_weights)
    A::reduce_rows(w, ReduceSpec{p.out_weights + t * p.topk, weight_rows, nullptr, n, {nullptr, nullptr}, DType::f32, p.topk});
}

/// Sums token `t` if all its rows are there. Otherwise names the missing one in `stall` and returns false.
template <class A>
SWITCHYARD_FN bool sum_token(typename A::Warp& w, const RingCombineParams& p, CombineConsumer<A>& s, int64_t t,
                             RingStall& stall, MoveCounter& moved) {
  const CombineParams& c = p.c;
  const void* rows[kMaxRanks > kMaxTopk ? kMaxRanks : kMaxTopk];
  const void* weight_rows[kMaxRanks > kMaxTopk ? kMaxRanks : kMaxTopk];
  float weights[kMaxTopk];
  int16_t taken[kMaxRanks];
  for (int r = 0; r < c.call.world(); ++r) taken[r] = 0;
  int n = 0;
  auto take = [&](int rank) {
    RingReader<A>& reader = s.readers[rank];
    if (reader.consumed + taken[rank] >= reader.available) reader.poll();
    if (reader.consumed + taken[rank] >= reader.available) {
      stall = {Site::ring_tail, rank, reader.tail_flag()};
      return false;
    }
    const std::byte* slot = reader.slot(taken[rank]++);
    rows[n] = slot;
    weight_rows[n++] = slot + p.rings.record_at();
    return true;
  };
  if (c.layout == Layout::expert_major && c.order == CombineOrder::per_route) {
    for (int k = 0; k < c.topk; ++k) {
      const int64_t f = t * c.topk + k;
      if (c.route_row[f] < 0) continue;
      if (c.weights) weights[n] = c.weights[f];
      if (!take(c.map.owner(c.ids[f]))) return false;
    }
  } else {
    const SendEntry* entries = c.sends.of(t);
    const int places = c.sends.places(t);
    for (int i = 0; i < places; ++i)
      if (entries[i].row >= 0 && !take(entries[i].rank)) return false;
  }
  sum_rows<A>(w, c, t, rows, weights, weight_rows, n);
  for (int r = 0; r < c.call.world(); ++r) {
    s.readers[r].consumed += taken[r];
    (r == c.call.rank() ? moved.local_bytes : moved.remote_bytes) += static_cast<uint64_t>(taken[r] * c.row_bytes);
  }
  moved.rows += static_cast<uint64_t>(n);
  return true;
}

/// Sums up to one chunk of tokens. Returns whether any was summed.
template <class A>
SWITCHYARD_FN bool consume(typename A::Warp& w, const RingCombineParams& p, CombineConsumer<A>& s, RingStall& stall,
                           MoveCounter& moved) {
  const int64_t before = s.token;
  while (s.token < s.end && s.token - before < p.send_chunk && sum_token<A>(w, p, s, s.token, stall, moved)) ++s.token;
  if (s.token == before) return false;
  A::settle(w);  // slots have been read
  for (int r = 0; r < p.c.call.world(); ++r) s.readers[r].release(w);
  return true;
}

/// Kernel body: run by all warps of a rank. Producer streams and consumer channels are dealt to the warps in turn.
template <class A>
SWITCHYARD_FN void combine_ring_kernel(typename A::Warp& w, const RingCombineParams& p) {
  const CallContext& call = p.c.call;
  const int world = call.world(), channels = p.rings.num_channels;
  CombineProducer<A> producers[kMaxStreams];
  CombineConsumer<A> consumers[kMaxStreams];
  RingReader<A> readers[kMaxStreams];
  int num_producers = 0, num_consumers = 0, num_readers = 0;
  for (int i = w.index(); i < channels * world; i += w.total()) {
    const int channel = i / world, owner = (i + call.rank()) % world;
    const int64_t tokens = p.tokens_of[owner];
    producers[num_producers++] = CombineProducer<A>{{&call, &p.rings, channel, owner},
                                                    first_record_of(p, owner, channel_begin(tokens, channels, channel)),
                                                    first_record_of(p, owner, channel_begin(tokens, channels, channel + 1))};
  }
  for (int channel = w.index(); channel < channels; channel += w.total()) {
    consumers[num_consumers++] = CombineConsumer<A>{channel_begin(p.c.tokens, channels, channel),
                                                    channel_begin(p.c.tokens, channels, channel + 1), readers + num_readers};
    for (int r = 0; r < world; ++r) readers[num_readers++] = RingReader<A>{&call, &p.rings, channel, r};
  }
  MoveCounter moved;
  const bool ok = drive_streams<A>(w, call, [&](RingStall& stall, bool& progress) {
    int left = 0;
    for (int i = 0; i < num_producers; ++i) {
      CombineProducer<A>& s = producers[i];
      if (s.done) continue;
      if (s.open && produce<A>(w, p, s)) progress = true;
      s.done = !s.open && s.ring.drained();
      if (s.done) {
        progress = true;
        continue;
      }
      ++left;
      stall = {Site::ring_head, s.ring.consumer, s.ring.head_flag()};
    }
    for (int i = 0; i < num_consumers; ++i) {
      CombineConsumer<A>& s = consumers[i];
      if (s.done) continue;
      if (s.token < s.end && consume<A>(w, p, s, stall, moved)) progress = true;
      s.done = s.token == s.end && streams_ended<A>(p, s, stall);
      if (s.done)
        progress = true;
      else
        ++left;
    }
    return left;
  });
  if (!ok) return;
  A::settle(w);
  call.moved[w.index()] = moved;
}

}  // namespace switchyard::detail

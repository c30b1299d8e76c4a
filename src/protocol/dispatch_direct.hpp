// SPDX-License-Identifier: Apache-2.0
// Direct dispatch: each source writes its rows at their final place in the receivers' segments.
//
// | flag      | written by       | read by           | order           | scope  | reuse              |
// | placement | receiver         | all sources       | release/acquire | system | epoch, never reset |
// | rows      | source's last warp | receiver's warps | release/acquire | system | epoch, never reset |
//
// `rows` is one word per source and chunk of its tokens (expert-major: kRowChunks, else one); its value is the number of the
// source's records here up to the end of the chunk.
//
// Buffers: a receiver publishes a placement only for a block that nobody uses, so sources may write as soon as they see it. A
// receiver reads its block after `rows` of the source. Progress: a warp waits for chunk c of the rows only after it has sent
// its own chunk c + 1, or all, and arrived; receivers wait only for remote sends, which wait only for placements, which wait
// for nothing in this kernel.
#pragma once

#include "layout/control.hpp"
#include "plan/plan.hpp"
#include "protocol/counts.hpp"

namespace switchyard::detail {

/// Trivially copyable. Pointers are to this rank's private memory unless they say otherwise.
struct DispatchParams {
  CallContext call;
  ControlLayout control;

  // Rows to send.
  const std::byte* x = nullptr;       ///< [T] rows of src_row_bytes
  const std::byte* scales = nullptr;  ///< [T] rows of scale_bytes, or null
  int64_t tokens = 0;
  int64_t hidden = 0;
  int64_t src_row_bytes = 0;
  DType src_type = DType::bf16;
  ScaleKind quantize = ScaleKind::none;
  int64_t row_bytes = 0;    ///< of a sent row
  int64_t scale_bytes = 0;  ///< of a sent scale row

  // Where they go.
  SendTable sends;
  bool with_records = true;
  Layout layout = Layout::rank_major;
  ExpertMap map;
  int topk = 0;
  const int32_t* ids = nullptr;        ///< [T * K]
  const int32_t* route_row = nullptr;  ///< [T * K]
  const float* weights = nullptr;      ///< [T * K] or null

  // What arrives here.
  const int64_t* record_begin = nullptr;  ///< [W + 1] records by source
  const int32_t* record_route = nullptr;  ///< cached dispatch: [records * K] from the handle; else null: read from the block
  const int64_t* padding = nullptr;       ///< [experts here, 2] row ranges to zero, or null
  int num_padding = 0;
  int64_t* row_source = nullptr;  ///< expert-major: [rows] source of each row, or null: the host derives it from the records
  float* row_weight = nullptr;    ///< likewise

  const int32_t* chunk_records = nullptr;  ///< expert-major: records_by_chunk
  uint64_t* sends_done = nullptr;          ///< [kRowChunks] counters of warps, private to this rank
};

/// Where rank `r` takes this call's rows and records. Valid after wait for `placement`.
struct Destination {
  std::byte* block;
  OutputLayout layout;
  std::byte* records;
  RecordLayout record_layout;

  SWITCHYARD_FN int32_t* token() const { return reinterpret_cast<int32_t*>(records + record_layout.token_at()); }
  SWITCHYARD_FN int32_t* route() const { return reinterpret_cast<int32_t*>(records + record_layout.route_at()); }
  SWITCHYARD_FN float* weight() const { return reinterpret_cast<float*>(records + record_layout.weight_at()); }
};
SWITCHYARD_FN inline Destination destination(const DispatchParams& p, int r) {
  const Placement& place = *p.call.heap.local(p.control.placement(p.call.epoch, r));
  return {p.call.heap.base[r] + place.rows,
          {place.rows_allocated, p.row_bytes, p.scale_bytes},
          p.call.heap.base[r] + place.records,
          {place.records_allocated, p.topk}};
}

/// What route k of token t means at `rank`, and its weight: -1 and 0 where it goes elsewhere or was dropped.
SWITCHYARD_FN inline void write_route(const DispatchParams& p, int64_t t, int k, int rank, int32_t* route, float* weight) {
  const int first = p.map.first(rank), last = first + p.map.count(rank);
  const int64_t f = t * p.topk + k;
  const int32_t id = p.ids[f];
  const bool here = id >= first && id < last;
  *route = !here ? -1 : p.layout == Layout::rank_major ? id - first : p.route_row[f];
  if (p.weights) *weight = here ? p.weights[f] : 0.0f;
}

/// Writes the records of token t at all its receivers.
template <class A>
SWITCHYARD_FN void send_records(typename A::Warp& w, const DispatchParams& p, int64_t t, const SendEntry* entries, int places) {
  A::for_lanes(w, places * p.topk, [&](int i) {
    const SendEntry e = entries[i / p.topk];
    if (e.rank < 0) return;
    const int k = i % p.topk;
    const Destination d = destination(p, e.rank);
    const int64_t at = static_cast<int64_t>(e.record) * p.topk + k;
    write_route(p, t, k, e.rank, d.route() + at, d.weight() + at);
    if (k == 0) d.token()[e.record] = static_cast<int32_t>(t);
  });
}

/// Sends this warp's share of the tokens in [t, end): every (warp total())-th, from t on. All copies are settled on return.
/// Returns the next token of this warp.
template <class A>
SWITCHYARD_FN int64_t send_rows(typename A::Warp& w, const DispatchParams& p, int64_t t, int64_t end, MoveCounter& moved) {
  const uint64_t metadata = 4 + static_cast<uint64_t>(p.topk) * (p.weights ? 8 : 4);
  const auto payload = static_cast<uint64_t>(p.row_bytes + p.scale_bytes);
  for (; t < end; t += w.total()) {
    const SendEntry* entries = p.sends.of(t);
    const int places = p.sends.places(t);
    if (t + w.total() < p.tokens) {
      A::prefetch(w, p.sends.of(t + w.total()));
      if (p.with_records) A::prefetch(w, p.ids + (t + w.total()) * p.topk);
    }
    if (p.with_records) {
      send_records<A>(w, p, t, entries, places);
      moved.metadata_bytes +=
          metadata * static_cast<uint64_t>(bits(A::lanes_where(w, places, [&](int i) { return entries[i].rank >= 0; })));
    }
    const auto goes = [&](int i) { return entries[i].rank >= 0 && entries[i].row >= 0; };
    const uint64_t all = A::lanes_where(w, places, goes);
    if (all == 0) continue;
    const uint64_t own = A::lanes_where(w, places, [&](int i) { return goes(i) && entries[i].rank == p.call.rank(); });
    moved.rows += static_cast<uint64_t>(bits(all));
    moved.local_bytes += payload * static_cast<uint64_t>(bits(own));
    moved.remote_bytes += payload * static_cast<uint64_t>(bits(all & ~own));
    const std::byte* row = p.x + t * p.src_row_bytes;
    const std::byte* scale = p.scales ? p.scales + t * p.scale_bytes : nullptr;
    if (p.quantize != ScaleKind::none) {
      A::drain_sources(w);  // the staged row of the token before may still be read
      auto* staged = w.scratch();
      scale = staged + round_up(p.row_bytes, 128);
      A::quantize_row(w, reinterpret_cast<uint8_t*>(staged), const_cast<std::byte*>(scale), row, p.src_type, p.hidden,
                      p.quantize);
      row = staged;
    }
    const auto row_to = [&](int i) -> void* {
      return goes(i) ? destination(p, entries[i].rank).block + entries[i].row * p.row_bytes : nullptr;
    };
    A::multicast_to(w, places, row_to, row, static_cast<size_t>(p.row_bytes));
    if (!scale) continue;
    const auto scale_to = [&](int i) -> void* {
      if (!goes(i)) return nullptr;
      const Destination d = destination(p, entries[i].rank);
      return d.block + d.layout.scales_at() + entries[i].row * p.scale_bytes;
    };
    A::multicast_to(w, places, scale_to, scale, static_cast<size_t>(p.scale_bytes));
  }
  A::settle(w);
  return t;
}

/// Zeroes this warp's share of the padding rows of this rank's own block.
template <class A>
SWITCHYARD_FN void zero_padding(typename A::Warp& w, const DispatchParams& p, const Destination& mine) {
  for (int e = 0; e < p.num_padding; ++e) {
    const int64_t turn = (w.index() + int64_t{e} * 61) % w.total();  // another first warp for each expert
    for (int64_t row = p.padding[2 * e] + turn; row < p.padding[2 * e + 1]; row += w.total()) {
      A::fill_zero(w, mine.block + row * p.row_bytes, static_cast<size_t>(p.row_bytes));
      if (p.scale_bytes)
        A::fill_zero(w, mine.block + mine.layout.scales_at() + row * p.scale_bytes, static_cast<size_t>(p.scale_bytes));
    }
  }
}

/// Expert-major: copies each row of `source` that has further routes on this rank to their rows, by this warp's share of its
/// records [begin, end).
template <class A>
SWITCHYARD_FN void place_aliases(typename A::Warp& w, const DispatchParams& p, const Destination& mine, int source,
                                 int64_t begin, int64_t end, MoveCounter& moved) {
  const int32_t* routes = p.record_route ? p.record_route : mine.route();
  std::byte* scales = mine.block + mine.layout.scales_at();
  for (int64_t r = p.record_begin[source] + begin + w.index(); r < p.record_begin[source] + end; r += w.total()) {
    const int32_t* route = routes + r * p.topk;
    if (p.row_source) {
      A::for_lanes(w, p.topk, [&](int k) {
        const int32_t row = route[k];
        if (row < 0) return;
        p.row_source[row] = pack_source(source, k, mine.token()[r]);
        p.row_weight[row] = mine.weight()[r * p.topk + k];
      });
    }
    const uint64_t all = A::lanes_where(w, p.topk, [&](int k) { return route[k] >= 0; });
    const uint64_t others = all & (all - 1);
    if (others == 0) continue;
    int first = 0;
    while ((all >> first & 1) == 0) ++first;
    const int64_t primary = route[first];
    const auto row_to = [&](int k) -> void* { return others >> k & 1 ? mine.block + route[k] * p.row_bytes : nullptr; };
    A::multicast_to(w, p.topk, row_to, mine.block + primary * p.row_bytes, static_cast<size_t>(p.row_bytes));
    if (p.scale_bytes) {
      const auto scale_to = [&](int k) -> void* { return others >> k & 1 ? scales + route[k] * p.scale_bytes : nullptr; };
      A::multicast_to(w, p.topk, scale_to, scales + primary * p.scale_bytes, static_cast<size_t>(p.scale_bytes));
    }
    moved.copied_bytes += static_cast<uint64_t>(bits(others)) * static_cast<uint64_t>(p.row_bytes + p.scale_bytes);
  }
}

/// Tells all receivers that this rank's rows up to the end of chunk c have come, and how many records these are.
template <class A>
SWITCHYARD_FN void publish_rows(typename A::Warp& w, const DispatchParams& p, int c) {
  const CallContext& call = p.call;
  A::template publish_to<Scope::system>(
      w, call.world(),
      [&](int r) {
        const auto records = p.chunk_records ? static_cast<uint64_t>(p.chunk_records[c * call.world() + r]) : 0;
        return FlagStore{call.heap.at(r, p.control.rows_flag(call.rank(), c)), flag_word(call.epoch, records)};
      },
      Site::rows);
}

/// Waits until chunk c of all sources has come.
template <class A>
SWITCHYARD_FN bool wait_rows(typename A::Warp& w, const DispatchParams& p, int c) {
  WarpSpan<A> span(w, p.call, Event::wait_rows, -1);
  return wait_ranks<A>(
      w, p.call, [&](int r) { return p.call.heap.local(p.control.rows_flag(r, c)); }, Site::rows, &span);
}

/// Expert-major: places the repeated routes of chunk c of all sources. False after a fault.
template <class A>
SWITCHYARD_FN bool place_chunk(typename A::Warp& w, const DispatchParams& p, const Destination& mine, int c,
                               MoveCounter& moved) {
  if (!wait_rows<A>(w, p, c)) return false;
  const CallContext& call = p.call;
  // The flags were acquired: a plain load will do.
  const auto records = [&](int source, int chunk) {
    return static_cast<int64_t>(flag_value(*call.heap.local(p.control.rows_flag(source, chunk))));
  };
  for (int step = 0; step < call.world(); ++step) {
    const int source = (call.rank() + step) % call.world();
    const WarpSpan<A> span(w, call, Event::place_aliases, source);
    place_aliases<A>(w, p, mine, source, c > 0 ? records(source, c - 1) : 0, records(source, c), moved);
  }
  return true;
}

/// Kernel body: run by all warps of a rank, after all placements have come (wait_placements) and agree. False after a fault
/// (recorded). On return without fault all rows for this warp's share of the receiver work are complete; the call is complete
/// when all warps have returned, and when warp 0 has, all warps of this rank have begun.
template <class A>
SWITCHYARD_FN bool dispatch_direct(typename A::Warp& w, const DispatchParams& p) {
  const CallContext& call = p.call;
  const bool expert_major = p.layout == Layout::expert_major;
  const int chunks = expert_major ? kRowChunks : 1;
  const Destination mine = destination(p, call.rank());
  MoveCounter moved;
  int64_t token = w.index();
  for (int c = 0; c < chunks; ++c) {
    {
      WarpSpan<A> span(w, call, Event::send_rows);
      token = send_rows<A>(w, p, token, expert_major ? row_chunk_end(p.tokens, c) : p.tokens, moved);
      span.set_arg(static_cast<int64_t>(moved.rows));
    }
    if (arrive_is_last<A>(w, p.sends_done + c)) publish_rows<A>(w, p, c);
    if (c == 0) {
      const WarpSpan<A> span(w, call, Event::zero_padding, p.num_padding);
      zero_padding<A>(w, p, mine);
    } else if (!place_chunk<A>(w, p, mine, c - 1, moved)) {
      return false;
    }
  }
  if (expert_major && !place_chunk<A>(w, p, mine, chunks - 1, moved)) return false;
  A::settle(w);
  call.moved[w.index()] = moved;
  if (expert_major || w.index() != 0) return true;
  return wait_rows<A>(w, p, 0);  // nothing to do with what arrives: one warp waits for it
}

}  // namespace switchyard::detail

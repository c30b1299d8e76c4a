// SPDX-License-Identifier: Apache-2.0
// Direct dispatch: each source writes its rows to their final places in the receivers' segments.
//
// | flag      | written by       | read by           | order           | scope  | reuse              |
// | placement | receiver         | all sources       | release/acquire | system | epoch, never reset |
// | rows      | source's last warp | receiver's warps | release/acquire | system | epoch, never reset |
//
// `rows` has one word per source and chunk of its tokens. If announces_in_chunks, there are kRowChunks words per source, of
// which rank-major dispatch uses every third; a word's value is the number of the source's records at this receiver up to the
// end of the chunk. Otherwise, there is one word per source.
//
// Buffers: a receiver publishes a placement only for a block that is not in use, so sources may write to the block as soon as
// they acquire the placement. A receiver reads its block after acquiring the source's `rows`. Tokens are assigned to warps
// dynamically (work_queue.hpp), and so are the records whose repeated routes must be placed or whose rows must be copied.
//
// Progress: a sending warp waits for chunk c of the rows only after it has sent its own chunk c + 1, or all chunks, and has
// arrived. A warp that does not send waits for remote sends. Sends wait only for placements, which do not wait for anything in
// this kernel.
#pragma once

#include "layout/control.hpp"
#include "plan/plan.hpp"
#include "protocol/counts.hpp"
#include "protocol/normal/chunks.hpp"
#include "protocol/work_queue.hpp"

namespace switchyard::detail {

/// Start of a call. The host sets the context; on a GPU, the kernel fills in the values that only the device knows: the epoch
/// and T.
struct MoveStart {
  CallContext call;
  int64_t tokens = 0;
};

/// The caller's arguments, set by NormalImpl::move_shape.
struct MoveShape {
  ControlLayout control;
  const std::byte* x = nullptr;       ///< [T] rows of src_row_bytes
  const std::byte* scales = nullptr;  ///< [T] rows of scale_bytes, or null
  const float* weights = nullptr;     ///< [T * K] or null: records carry no weights
  int64_t hidden = 0;
  int64_t src_row_bytes = 0;
  int64_t row_bytes = 0;    ///< per row sent
  int64_t scale_bytes = 0;  ///< per scale row sent
  DType src_type = DType::bf16;
  ScaleKind quantize = ScaleKind::none;
  Layout layout = Layout::rank_major;
  bool with_records = true;  ///< false: cached dispatch
  ExpertRanges map;
  int topk = 0;
};

/// Pointers to the plan's tables, set by each backend's move_tables.
struct MoveTables {
  SendTable sends;
  const int32_t* ids = nullptr;            ///< [T * K]
  const int32_t* route_row = nullptr;      ///< [T * K]
  const int64_t* record_begin = nullptr;   ///< [W + 1] records by source
  const int32_t* record_route = nullptr;   ///< cached dispatch: [records * K] from the handle; else null: read from the block
  const int32_t* chunk_records = nullptr;  ///< records_by_chunk; required if announces_in_chunks
  const int64_t* padding = nullptr;        ///< [num_padding, 2] row ranges to zero
  int num_padding = 0;
  int64_t* row_source = nullptr;  ///< expert-major: [rows] source of each row, or null: the host derives it from the records
  float* row_weight = nullptr;    ///< expert-major: [rows] weight of each row, or null like row_source
};

/// Rank-major rows for the caller's memory; they arrive in symmetric memory and are copied out as they arrive.
struct MoveCopies {
  const std::byte* rows = nullptr;  ///< memory in which rows arrive: [rows], as published in the placement; null: not copied
  std::byte* to_rows = nullptr;
  std::byte* to_scales = nullptr;
  bool includes_own = true;  ///< false: this rank's own rows go directly to to_rows
};

/// How this rank's warps share the work. The counters are private to the rank and 0 between calls. Set by each backend's move.
struct MoveWork {
  int send_blocks = 0;  ///< the first blocks send, the others place or copy rows meanwhile; 0: all blocks do both in turn
  uint64_t* sends_done = nullptr;   ///< [kRowChunks] blocks, or warps, that have sent a chunk
  uint64_t* sends_next = nullptr;   ///< number of assigned tokens
  uint64_t* places_next = nullptr;  ///< number of assigned records
  BlockCounters sends_of_block;     ///< [kRowChunks]
};

/// Trivially copyable. Each part is set as a whole, in one place. Pointers refer to this rank's private memory unless noted
/// otherwise.
struct DispatchParams : MoveStart {
  MoveShape shape;
  MoveTables tables;
  MoveCopies copies;
  MoveWork work;
};

/// True if sources announce their rows in chunks because receivers process them on arrival. Valid once all placements have
/// arrived.
template <class A>
SWITCHYARD_FN bool announces_in_chunks(typename A::Warp& w, const DispatchParams& p) {
  const auto copies = [&](int r) {
    return p.call.heap.local(p.shape.control.placement(p.call.epoch, r))->dispatch.copies_out != 0;
  };
  return p.shape.layout == Layout::expert_major || A::lanes_where(w, p.call.world(), copies) != 0;
}

/// Number of chunks announced by one flag. The flag that is set is that of the last of these chunks.
SWITCHYARD_FN inline int chunks_per_flag(const DispatchParams& p) {
  return p.shape.layout == Layout::expert_major ? 1 : kCopiedTogether;
}

/// The memory in which rank `r` receives this call's rows and records. Valid after the wait for `placement`.
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
  const Placement& place = *p.call.heap.local(p.shape.control.placement(p.call.epoch, r));
  return {p.call.heap.base[r] + place.rows,
          {place.dispatch.rows_allocated, p.shape.row_bytes, p.shape.scale_bytes},
          p.call.heap.base[r] + place.dispatch.records,
          {place.dispatch.records_allocated, p.shape.topk}};
}

/// Writes the local expert id and the weight of route k of token t at `rank`, or -1 and 0 if the route is for another rank or
/// was dropped.
SWITCHYARD_FN inline void write_route(const DispatchParams& p, int64_t t, int k, int rank, int32_t* route, float* weight) {
  const int first = p.shape.map.first(rank), last = first + p.shape.map.count(rank);
  const int64_t f = t * p.shape.topk + k;
  const int32_t id = p.tables.ids[f];
  const bool here = id >= first && id < last;
  *route = !here ? -1 : p.shape.layout == Layout::rank_major ? id - first : p.tables.route_row[f];
  if (p.shape.weights) *weight = here ? p.shape.weights[f] : 0.0f;
}

/// Writes the records of token t, whose number at its source is `token`, to all its receivers on this host.
template <class A>
SWITCHYARD_FN void send_records(typename A::Warp& w, const DispatchParams& p, int64_t t, int64_t token,
                                const SendEntry* entries, int places) {
  A::for_lanes(w, places * p.shape.topk, [&](int i) {
    const SendEntry e = entries[i / p.shape.topk];
    if (e.rank < 0 || !is_mapped<A>(p.call.heap, e.rank)) return;
    const int k = i % p.shape.topk;
    const Destination d = destination(p, e.rank);
    const int64_t at = static_cast<int64_t>(e.record) * p.shape.topk + k;
    write_route(p, t, k, e.rank, d.route() + at, d.weight() + at);
    if (k == 0) d.token()[e.record] = static_cast<int32_t>(token);
  });
}

/// True if this rank sends a row for this entry.
SWITCHYARD_FN inline bool has_row(const SendEntry& e) { return e.rank >= 0 && e.row >= 0; }

/// Sends a row, and its scales if any, to its token's places on this host. The copies are pending on return.
template <class A>
SWITCHYARD_FN void send_row(typename A::Warp& w, const DispatchParams& p, const SendEntry* entries, int places,
                            const std::byte* row, const std::byte* scale) {
  const int first = (p.call.rank() + 1) % places;  // as CallContext::in_turn
  const auto is_sent = [&](int i) { return has_row(entries[i]) && is_mapped<A>(p.call.heap, entries[i].rank); };
  const auto row_to = [&](int n) -> void* {
    const int i = around(n, first, places);
    return is_sent(i) ? destination(p, entries[i].rank).block + entries[i].row * p.shape.row_bytes : nullptr;
  };
  A::multicast_to(w, places, row_to, row, static_cast<size_t>(p.shape.row_bytes));
  if (!scale) return;
  const auto scale_to = [&](int n) -> void* {
    const int i = around(n, first, places);
    if (!is_sent(i)) return nullptr;
    const Destination d = destination(p, entries[i].rank);
    return d.block + d.layout.scales_at() + entries[i].row * p.shape.scale_bytes;
  };
  A::multicast_to(w, places, scale_to, scale, static_cast<size_t>(p.shape.scale_bytes));
}

/// Sends the tokens below `end` that this warp claims. All copies are settled on return.
template <class A>
SWITCHYARD_FN void send_rows(typename A::Warp& w, const DispatchParams& p, WorkQueue<A>& tokens, int64_t end,
                             MoveCounter& moved) {
  const uint64_t metadata = 4 + static_cast<uint64_t>(p.shape.topk) * (p.shape.weights ? 8 : 4);
  const auto payload = static_cast<uint64_t>(p.shape.row_bytes + p.shape.scale_bytes);
  for (int64_t t = 0; (t = tokens.item(w)) < end; tokens.done()) {
    const SendEntry* entries = p.tables.sends.of(t);
    const int places = p.tables.sends.places(t);
    if (p.shape.with_records) {
      send_records<A>(w, p, t, t, entries, places);
      moved.metadata_bytes +=
          metadata * static_cast<uint64_t>(bits(A::lanes_where(w, places, [&](int i) { return entries[i].rank >= 0; })));
    }
    const auto is_sent = [&](int i) { return has_row(entries[i]); };
    const uint64_t all = A::lanes_where(w, places, is_sent);
    if (all == 0) continue;
    const uint64_t own = A::lanes_where(w, places, [&](int i) { return is_sent(i) && entries[i].rank == p.call.rank(); });
    moved.payload_rows += static_cast<uint64_t>(bits(all));
    moved.local_bytes += payload * static_cast<uint64_t>(bits(own));
    moved.remote_bytes += payload * static_cast<uint64_t>(bits(all & ~own));
    const std::byte* row = p.shape.x + t * p.shape.src_row_bytes;
    const std::byte* scale = p.shape.scales ? p.shape.scales + t * p.shape.scale_bytes : nullptr;
    if (p.shape.quantize != ScaleKind::none) {
      A::drain_sources(w);  // the staged row of the previous token may still be read
      auto* staged = w.scratch();
      scale = staged + round_up(p.shape.row_bytes, 128);
      A::quantize_row(w, reinterpret_cast<uint8_t*>(staged), const_cast<std::byte*>(scale), row, p.shape.src_type,
                      p.shape.hidden, p.shape.quantize);
      row = staged;
    }
    send_row<A>(w, p, entries, places, row, scale);
  }
  A::settle(w);
}

/// Zeroes this warp's share of the padding rows of this rank's own block.
template <class A>
SWITCHYARD_FN void zero_padding(typename A::Warp& w, const DispatchParams& p, const Destination& mine, const Share& share) {
  for (int e = 0; e < p.tables.num_padding; ++e) {
    const int64_t turn = (share.index + int64_t{e} * 61) % share.step;  // each expert starts with a different warp
    for (int64_t row = p.tables.padding[2 * e] + turn; row < p.tables.padding[2 * e + 1]; row += share.step) {
      A::fill_zero(w, mine.block + row * p.shape.row_bytes, static_cast<size_t>(p.shape.row_bytes));
      if (p.shape.scale_bytes)
        A::fill_zero(w, mine.block + mine.layout.scales_at() + row * p.shape.scale_bytes,
                     static_cast<size_t>(p.shape.scale_bytes));
    }
  }
}

/// Expert-major: copies the row of record r, which arrived from `source`, to the rows of its other routes on this rank.
template <class A>
SWITCHYARD_FN void place_aliases(typename A::Warp& w, const DispatchParams& p, const Destination& mine, int source, int64_t r,
                                 MoveCounter& moved) {
  const int32_t* const route = (p.tables.record_route ? p.tables.record_route : mine.route()) + r * p.shape.topk;
  if (p.tables.row_source) {
    A::for_lanes(w, p.shape.topk, [&](int k) {
      const int32_t row = route[k];
      if (row < 0) return;
      p.tables.row_source[row] = pack_source(source, k, mine.token()[r]);
      p.tables.row_weight[row] = mine.weight()[r * p.shape.topk + k];
    });
  }
  const uint64_t all = A::lanes_where(w, p.shape.topk, [&](int k) { return route[k] >= 0; });
  const uint64_t others = all & (all - 1);
  if (others == 0) return;
  const int64_t primary = route[nth_bit(all, 0)];
  const auto row_to = [&](int k) -> void* { return others >> k & 1 ? mine.block + route[k] * p.shape.row_bytes : nullptr; };
  A::multicast_to(w, p.shape.topk, row_to, mine.block + primary * p.shape.row_bytes, static_cast<size_t>(p.shape.row_bytes));
  if (p.shape.scale_bytes) {
    std::byte* const scales = mine.block + mine.layout.scales_at();
    const auto scale_to = [&](int k) -> void* { return others >> k & 1 ? scales + route[k] * p.shape.scale_bytes : nullptr; };
    A::multicast_to(w, p.shape.topk, scale_to, scales + primary * p.shape.scale_bytes,
                    static_cast<size_t>(p.shape.scale_bytes));
  }
  moved.copied_bytes += static_cast<uint64_t>(bits(others)) * static_cast<uint64_t>(p.shape.row_bytes + p.shape.scale_bytes);
}

/// Announces to all receivers that this rank's rows up to the end of chunk c have arrived. If `in_chunks` is true, the flags
/// also contain the number of these records; otherwise, all rows are in chunk 0 and the number is not used.
template <class A>
SWITCHYARD_FN void publish_rows(typename A::Warp& w, const DispatchParams& p, int c, bool in_chunks) {
  const CallContext& call = p.call;
  A::template publish_to<Scope::system>(
      w, call.world(),
      [&](int r) {
        const auto records = in_chunks ? static_cast<uint64_t>(p.tables.chunk_records[c * call.world() + r]) : 0;
        return FlagStore{reach<A>(call.heap, r, p.shape.control.rows_flag(call.rank(), c)), flag_word(call.epoch, records)};
      },
      Site::rows);
}

/// Waits until chunk c of all sources has arrived.
template <class A>
SWITCHYARD_FN bool wait_rows(typename A::Warp& w, const DispatchParams& p, int c) {
  WarpSpan<A> span(w, p.call, Event::wait_rows, -1);
  return wait_ranks<A>(
      w, p.call, [&](int r) { return p.call.heap.local(p.shape.control.rows_flag(r, c)); }, Site::rows, span);
}

/// Arrived records that need further work, in order of arrival: by chunk, then by source.
template <class A>
struct PlaceQueue {
  static constexpr int kBatch = 4;  ///< expert-major: records taken at a time, because most have nothing to copy
  WorkQueue<A> records;
  int64_t base = 0;  ///< records of earlier chunks
};

/// Rank-major: copies the row and scales of record r, which arrived from `source`, to the caller's memory.
template <class A>
SWITCHYARD_FN void copy_record_out(typename A::Warp& w, const DispatchParams& p, const Destination& mine, int source, int64_t r,
                                   MoveCounter& moved) {
  const auto copy = [&](std::byte* to, const std::byte* from, int64_t bytes) {
    A::multicast_to(
        w, 1, [&](int) -> void* { return to + r * bytes; }, from + r * bytes, static_cast<size_t>(bytes));
    moved.copied_bytes += static_cast<uint64_t>(bytes);
  };
  if (p.copies.includes_own || source != p.call.rank()) copy(p.copies.to_rows, p.copies.rows, p.shape.row_bytes);
  if (p.shape.scale_bytes) copy(p.copies.to_scales, p.copies.rows + mine.layout.scales_at(), p.shape.scale_bytes);
}

/// Processes this warp's part of all sources' records in chunk c and in the earlier chunks announced by the same flag.
/// Expert-major: places their repeated routes. Rank-major: copies their rows to the caller's memory. Returns false after a
/// fault.
template <class A>
SWITCHYARD_FN bool take_chunk(typename A::Warp& w, const DispatchParams& p, const Destination& mine, int c,
                              PlaceQueue<A>& queue, MoveCounter& moved) {
  if (!wait_rows<A>(w, p, c)) return false;
  const CallContext& call = p.call;
  const bool copies = p.shape.layout == Layout::rank_major;
  const int earlier = c - chunks_per_flag(p);
  WarpSpan<A> span(w, call, copies ? Event::copy_out : Event::place_aliases);
  int64_t placed = 0;
  // The flags have been acquired, so a plain load suffices.
  const auto arrived_records = [&](int source, int chunk) {
    const auto sent = static_cast<int64_t>(flag_value(*call.heap.local(p.shape.control.rows_flag(source, chunk))));
    if (!copies) return sent;
    const int64_t kept = p.tables.record_begin[source + 1] - p.tables.record_begin[source];  // the last may have been dropped
    return sent < kept ? sent : kept;
  };
  const auto before = [&](int source) { return earlier >= 0 ? arrived_records(source, earlier) : 0; };
  for (;; queue.records.done(), ++placed) {
    const int64_t i = queue.records.item(w) - queue.base;
    const Located at = A::locate(w, i, call.world(), [&](int source) { return arrived_records(source, c) - before(source); });
    if (at.segment == call.world()) {
      queue.base += i - at.offset;
      span.set_arg(placed);
      return true;
    }
    const int64_t record = p.tables.record_begin[at.segment] + before(at.segment) + at.offset;
    if (copies)
      copy_record_out<A>(w, p, mine, at.segment, record, moved);
    else
      place_aliases<A>(w, p, mine, at.segment, record, moved);
  }
}

/// Kernel body: run by all warps of a rank after all placements have arrived (wait_placements) and agree. Returns false after
/// recording a fault. On return without a fault, all rows for this warp's share of the receiver work are complete; the call is
/// complete when all warps have returned. Without send_blocks, all warps of this rank have begun by the time warp 0 returns.
template <class A>
SWITCHYARD_FN bool dispatch_direct(typename A::Warp& w, const DispatchParams& p) {
  const CallContext& call = p.call;
  const bool expert_major = p.shape.layout == Layout::expert_major, receives = expert_major || p.copies.rows != nullptr;
  const int last = announces_in_chunks<A>(w, p) ? kRowChunks - 1 : 0, blocks = w.num_blocks();
  const bool split_roles = p.work.send_blocks > 0;
  const int senders = split_roles ? p.work.send_blocks : blocks;
  // With so few tokens, several steps would take longer than the copies.
  const bool one_step = last > 0 && !expert_major && p.tokens <= int64_t{senders} * w.warps_per_block();
  const int per_flag = last > 0 ? chunks_per_flag(p) : 1, step = one_step ? kRowChunks : per_flag;
  const Destination mine = destination(p, call.rank());
  const Share all = share_of_blocks(w, 0, blocks);
  PlaceQueue<A> queue{WorkQueue<A>(p.work.places_next, expert_major ? PlaceQueue<A>::kBatch : 1)};
  MoveCounter moved;
  const auto zero = [&](const Share& share) {
    const WarpSpan<A> span(w, call, Event::zero_padding, p.tables.num_padding);
    zero_padding<A>(w, p, mine, share);
  };
  if (!split_roles || w.block() < p.work.send_blocks) {
    WorkQueue<A> tokens(p.work.sends_next, A::kTakenAtOnce);
    for (int c = step - 1; c <= last; c += step) {
      {
        WarpSpan<A> span(w, call, Event::send_rows);
        const MoveCounter before = moved;
        send_rows<A>(w, p, tokens, last > 0 ? row_chunk_end(p.tokens, c) : p.tokens, moved);
        span.set_arg(static_cast<int64_t>(moved.payload_rows - before.payload_rows));
        span.set_bytes(moved.remote_bytes - before.remote_bytes);
      }
      if (arrive_is_last<A>(w, p.work.sends_of_block, c, p.work.sends_done + c, senders)) {
        if (c == last) WorkQueue<A>::reset(w, p.work.sends_next);
        if (c < step) WorkQueue<A>::reset(w, p.work.places_next);  // for the previous call; no warp uses it before `rows`
        for (int flag = c - step + per_flag; flag <= c; flag += per_flag) publish_rows<A>(w, p, flag, last > 0);
      }
      if (split_roles) continue;
      if (c < step) zero(all);
      if (receives && c >= step && !take_chunk<A>(w, p, mine, c - step, queue, moved)) return false;
    }
  } else {
    zero(share_of_blocks(w, p.work.send_blocks, blocks));
  }
  if (receives) {
    for (int c = split_roles || one_step ? per_flag - 1 : last; c <= last; c += per_flag)
      if (!take_chunk<A>(w, p, mine, c, queue, moved)) return false;
  }
  A::settle(w);
  call.moved[w.index()] = moved;
  if (receives || w.index() != 0) return true;
  return wait_rows<A>(w, p, last);  // no work on arrival: one warp waits for all rows
}

}  // namespace switchyard::detail

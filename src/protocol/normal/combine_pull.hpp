// SPDX-License-Identifier: Apache-2.0
// Combine by pulling rank-major rows: each token's owner reads the rows of its experts in place and sums them. A rank whose
// rows are in memory that peers cannot read uses combine_copies.hpp in the same call. Expert-major rows are combined by
// combine_sums.hpp (per_rank) and combine_routes.hpp (per_route).
//
// | flag      | written by               | read by         | order           | scope  | reuse              |
// | placement | expert's warp 0, at once | all owners      | release/acquire | system | epoch, never reset |
// | outputs   | ranks that copy, each chunk | all owners   | release/acquire | system | epoch, never reset |
// | pulled    | owner's last warp        | expert's warp 0 | release/acquire | system | epoch, never reset |
//
// Buffers: peers read a rank's rows until they set `pulled`, so the rows may be changed again when the call returns. Progress:
// a rank that runs this code waits for `outputs` of other ranks, which do not wait before they publish it, and for `pulled` at
// the end.
#pragma once

#include "plan/plan.hpp"
#include "protocol/counts.hpp"
#include "protocol/normal/chunks.hpp"
#include "protocol/work_queue.hpp"

namespace switchyard::detail {

/// Start of a call. The host sets the context; on a GPU, the kernel sets the other members, because only the device knows them.
struct SumStart {
  CallContext call;
  int64_t tokens = 0;
  int64_t num_records = 0;
  const float* record_weight = nullptr;  ///< [records * K] or null: expert-major per_rank, if the dispatch carried weights
  const float* weights = nullptr;        ///< [T * K] or null: expert-major per_route, from the caller or from the dispatch
};

/// The caller's arguments, set by NormalImpl::sum_shape.
struct SumShape {
  ControlLayout control;
  Layout layout = Layout::rank_major;
  CombineOrder order = CombineOrder::per_rank;
  DType type = DType::bf16;
  int topk = 0;
  ExpertRanges map;
  int64_t hidden = 0;
  int64_t row_bytes = 0;
  const std::byte* y = nullptr;       ///< expert side: [rows]
  const float* weights_in = nullptr;  ///< expert side, rank-major: [records, K] or null
  const std::byte* bias[2] = {nullptr, nullptr};
  std::byte* out = nullptr;
  float* out_weights = nullptr;
};

/// Pointers to the plan's tables, set by each backend's sum_tables.
struct SumTables {
  // Expert side.
  const int64_t* record_begin = nullptr;  ///< [W + 1] records by owner
  const int32_t* record_token = nullptr;  ///< [records]
  const int64_t* tokens_of = nullptr;     ///< [W] tokens of each owner
  const int32_t* record_route = nullptr;  ///< [records * K]
  // Owner side.
  SendTable sends;
  const int32_t* ids = nullptr;        ///< [T * K]
  const int32_t* route_row = nullptr;  ///< [T * K]
};

/// Rows that are read in place, rows that are staged, and this rank's placement of both. Set by NormalImpl::stage.
struct SumStaging {
  std::byte* staged = nullptr;          ///< symmetric: copy of y, or the partial sums [records]; null if y is not staged
  float* weights_staged = nullptr;      ///< symmetric copy of weights_in
  const std::byte* inbox = nullptr;     ///< expert-major per_route: [T * K] rows that other ranks push, in symmetric memory
  const uint64_t* distances = nullptr;  ///< for rows in registered memory: see publish_placement
  Placement place{};                    ///< GPU: the kernel completes its signature
  bool reduce_locally = false;          ///< expert-major per_rank: staged[record] = sum over its rows; else staged = y
  /// Rank-major, staged: rows of this rank's own tokens are not staged; this rank reads them from `y`. own_rows is the offset
  /// of `y` for `offered`.
  bool own_in_place = false;
  uint64_t own_rows = 0;
};

/// How this rank's warps share the work. The counters are private to the rank and 0 between calls. Set by each backend's sum.
struct SumWork {
  int sum_blocks = 0;              ///< the first blocks only sum, push or copy rows; 0: all blocks do so, before anything else
  uint64_t* sums_done = nullptr;   ///< [kSumChunks] counts of blocks, or warps
  uint64_t* pulls_done = nullptr;  ///< counts of blocks, or warps
  uint64_t* sums_next = nullptr;   ///< next record to be summed, pushed or copied
  uint64_t* pulls_next = nullptr;  ///< next token to be summed
  BlockCounters of_block;          ///< [kSumChunks + 1]: sums, then pulls
};

/// Trivially copyable. Each part is set as a whole, in one place. Pointers refer to this rank's memory.
struct CombineParams : SumStart {
  SumShape shape;
  SumTables tables;
  SumStaging staging;
  SumWork work;
};

/// First record of `owner` whose token is at least `token`. The records of one owner are in ascending order of their tokens.
SWITCHYARD_FN inline int64_t first_record_of(const CombineParams& p, int owner, int64_t token) {
  int64_t low = p.tables.record_begin[owner], high = p.tables.record_begin[owner + 1];
  while (low < high) {
    const int64_t mid = low + (high - low) / 2;
    if (p.tables.record_token[mid] < token)
      low = mid + 1;
    else
      high = mid;
  }
  return low;
}

/// Address of the memory that rank `r` offers at `offset`: within its segment or, for registered memory, beyond it (modulo
/// 2^64).
SWITCHYARD_FN inline const std::byte* offered(const HeapView& heap, int r, uint64_t offset) {
  return reinterpret_cast<const std::byte*>(reinterpret_cast<uint64_t>(heap.base[r]) + offset);
}

/// Expert side: sums the rows of one record, with k ascending, into its staged row. Returns false if the record has no rows.
template <class A>
SWITCHYARD_FN bool reduce_record(typename A::Warp& w, const CombineParams& p, int64_t record, void* out) {
  const int32_t* route = p.tables.record_route + record * p.shape.topk;
  if (A::lanes_where(w, p.shape.topk, [&](int k) { return route[k] >= 0; }) == 0) return false;
  A::template reduce_rows_from<kMaxTopk>(
      w, ReduceSpec{out, nullptr, nullptr, 0, {nullptr, nullptr}, p.shape.type, p.shape.hidden}, p.shape.topk,
      p.record_weight != nullptr,
      [&](int k) -> const void* { return route[k] >= 0 ? p.shape.y + route[k] * p.shape.row_bytes : nullptr; },
      [&](int k) { return p.record_weight[record * p.shape.topk + k]; });
  return true;
}

/// Sources of one token's rows, in summation order.
struct TokenRows {
  const CombineParams* c;
  int64_t first_route;  ///< of the token
  const SendEntry* entries;
  int places;     ///< number of routes (by_route) or ranks: at most K
  bool by_route;  ///< a row per route, else one per rank

  /// The rank that holds the row of place i; -1: no row.
  SWITCHYARD_FN int rank(int i) const {
    if (!by_route) return entries[i].rank >= 0 && entries[i].row >= 0 ? entries[i].rank : -1;
    const int64_t f = first_route + i;
    return c->tables.route_row[f] >= 0 ? c->shape.map.owner(c->tables.ids[f]) : -1;
  }
};
SWITCHYARD_FN inline TokenRows rows_of(const CombineParams& p, int64_t t) {
  const bool by_route = p.shape.layout == Layout::expert_major && p.shape.order != CombineOrder::per_rank;
  return {&p, t * p.shape.topk, p.tables.sends.of(t), by_route ? p.shape.topk : p.tables.sends.places(t), by_route};
}

/// A range of a row's columns, in bytes (multiples of 16).
struct RowPart {
  int64_t begin = 0;
  int64_t bytes;
};
SWITCHYARD_FN inline RowPart part_of_row(int64_t row_bytes, int part, int parts) {
  const int64_t size = round_up((row_bytes + parts - 1) / parts, 128), begin = part * size;
  const int64_t left = row_bytes - begin;
  return {begin, left < size ? (left < 0 ? 0 : left) : size};
}

/// Owner side: sums a part of token t from the rows row_of(i), which point to the part's first column, and on request sums the
/// token's weights from weights_of(i). The stores are pending on return.
template <class A, class Row, class Weights>
SWITCHYARD_FN void sum_rows(typename A::Warp& w, const CombineParams& p, int64_t t, const TokenRows& rows, Row&& row_of,
                            Weights&& weights_of, MoveCounter& moved, const RowPart& part) {
  const uint64_t all = A::lanes_where(w, rows.places, [&](int i) { return rows.rank(i) >= 0; });
  const uint64_t own = A::lanes_where(w, rows.places, [&](int i) { return rows.rank(i) == p.call.rank(); });
  if (part.begin == 0) moved.payload_rows += static_cast<uint64_t>(bits(all));
  moved.local_bytes += static_cast<uint64_t>(bits(own) * part.bytes);
  moved.remote_bytes += static_cast<uint64_t>(bits(all & ~own) * part.bytes);
  const int64_t at = t * p.shape.row_bytes + part.begin;
  const void* bias0 = p.shape.bias[0] ? p.shape.bias[0] + at : nullptr;
  const void* bias1 = p.shape.bias[1] ? p.shape.bias[1] + at : nullptr;
  const int64_t columns = part.bytes == p.shape.row_bytes ? p.shape.hidden : part.bytes * p.shape.hidden / p.shape.row_bytes;
  A::template reduce_rows_from<kMaxTopk>(
      w, ReduceSpec{p.shape.out + at, nullptr, nullptr, 0, {bias0, bias1}, p.shape.type, columns}, rows.places,
      rows.by_route && p.weights, row_of, [&](int i) { return p.weights[t * p.shape.topk + i]; });
  if (!p.shape.out_weights || part.begin != 0) return;
  A::template reduce_rows_from<kMaxTopk>(
      w, ReduceSpec{p.shape.out_weights + t * p.shape.topk, nullptr, nullptr, 0, {nullptr, nullptr}, DType::f32, p.shape.topk},
      rows.places, false, weights_of, [](int) { return 0.0f; });
}

/// Owner side: sums a part of token t, reading its rows in place. The stores are pending on return.
template <class A>
SWITCHYARD_FN void reduce_token(typename A::Warp& w, const CombineParams& p, int64_t t, const RowPart& part,
                                MoveCounter& moved) {
  const HeapView& heap = p.call.heap;
  const TokenRows rows = rows_of(p, t);
  const auto row_of = [&](int i) -> const void* {
    const int rank = rows.rank(i);
    if (rank < 0) return nullptr;
    const int64_t record = rows.entries[i].record;
    return offered(heap, rank, heap.local(p.shape.control.placement(p.call.epoch, rank))->rows) + record * p.shape.row_bytes +
           part.begin;
  };
  const auto weights_of = [&](int i) -> const void* {
    const int rank = rows.rank(i);
    if (rank < 0) return nullptr;
    const uint64_t at = heap.local(p.shape.control.placement(p.call.epoch, rank))->pull.weights;
    return heap.base[rank] + at + static_cast<int64_t>(rows.entries[i].record) * p.shape.topk * 4;
  };
  sum_rows<A>(w, p, t, rows, row_of, weights_of, moved, part);
}

/// Owner side: sums the tokens below `end` that this warp claims. The stores are pending on return.
template <class A>
SWITCHYARD_FN void pull_and_reduce(typename A::Warp& w, const CombineParams& p, WorkQueue<A>& tokens, int64_t end,
                                   MoveCounter& moved) {
  for (int64_t t = 0; (t = tokens.item(w)) < end; tokens.done()) reduce_token<A>(w, p, t, {0, p.shape.row_bytes}, moved);
}

/// How the warps of a rank share its tokens. Whole tokens are claimed as long as each warp gets the same number of them. The
/// remaining tokens, which would leave warps idle, are split into parts for these warps, because a warp's round trip to a peer
/// takes longer than its bytes.
struct PullItems {
  int64_t whole;
  int parts;  ///< of each remaining token
};
SWITCHYARD_FN inline PullItems pull_items(int64_t tokens, int64_t warps, int64_t row_bytes) {
  constexpr int kMax = 8, kMinBytes = 1024;
  const int64_t whole = tokens > 0 ? (tokens - 1) / warps * warps : 0;
  int parts = 1;
  while (parts < kMax && (tokens - whole) * (parts + 1) <= warps && row_bytes >= (parts + 1) * kMinBytes) ++parts;
  return {parts > 1 ? whole : tokens, parts};
}

/// Owner side: sums the parts that this warp claims, starting with part `item`, and adds the rows and bytes moved to
/// call.moved. `left` is the number of parts that this warp has claimed, the first of which is `item`; if it is 0, the warp has
/// only `item` and claims no other. Not inlined, so that the code for whole tokens can keep more values in registers. Settled
/// on return.
template <class A>
struct PullParts {
  SWITCHYARD_FN bool operator()(typename A::Warp& w, const CombineParams* params, int64_t item, int left) const {
    const CombineParams& p = *params;
    MoveCounter moved = p.call.moved[w.index()];
    const PullItems share = pull_items(p.tokens, w.total(), p.shape.row_bytes);
    const int64_t end = share.whole + (p.tokens - share.whole) * share.parts;
    WorkQueue<A> items(p.work.pulls_next, A::kTakenAtOnce, item, left);
    while (item < end) {
      const auto of = static_cast<int>(item - share.whole), t = of / share.parts;
      reduce_token<A>(w, p, share.whole + t, part_of_row(p.shape.row_bytes, of - t * share.parts, share.parts), moved);
      if (left == 0) break;
      items.done();
      item = items.item(w);
    }
    A::settle(w);
    p.call.moved[w.index()] = moved;
    return true;
  }
};

/// Owner side: sums this warp's share of the tokens that are split into parts; the first parts come from `items`, after the
/// whole tokens. Settled on return. call.moved then contains `moved` plus the rows and bytes that this warp moved in this
/// function.
template <class A>
SWITCHYARD_FN void pull_rest(typename A::Warp& w, const CombineParams& p, const PullItems& share, WorkQueue<A>& items,
                             const MoveCounter& moved) {
  p.call.moved[w.index()] = moved;
  if (share.parts > 1) {
    const bool queued = share.whole > 0;  // else each warp has at most one part, assigned statically
    const int64_t first = queued ? items.item(w) : w.index();
    A::out_of_line(w, PullParts<A>{}, &p, first, queued ? items.left() : 0);
  }
  A::settle(w);
}

/// Owner side: sums this warp's share of all tokens. Settled on return. call.moved then contains `moved` plus the rows and
/// bytes that this warp moved in this function.
template <class A>
SWITCHYARD_FN void pull_all(typename A::Warp& w, const CombineParams& p, MoveCounter moved) {
  const PullItems share = pull_items(p.tokens, w.total(), p.shape.row_bytes);
  WorkQueue<A> items(p.work.pulls_next, A::kTakenAtOnce);
  if (share.whole > 0) pull_and_reduce<A>(w, p, items, share.whole, moved);
  pull_rest<A>(w, p, share, items, moved);
}

/// The last step of every warp. The rank's last warp announces to all ranks whose rows are read in place that this rank has
/// finished pulling; warp 0 of such a rank waits until all ranks have finished. No other rank reads from the ranks in
/// `ranks_without_readers`. Nothing is announced to such a rank, because it may have left, and its warp 0 waits only for its
/// own rank's warps. The caller must have set call.moved.
template <class A>
SWITCHYARD_FN bool end_pulls(typename A::Warp& w, const CombineParams& p, uint64_t ranks_without_readers = 0) {
  const CallContext& call = p.call;
  const int self = call.rank();
  const auto flag_of = [&](int writer) { return p.shape.control.flag(Site::pulled, writer); };
  if (arrive_is_last<A>(w, p.work.of_block, kSumChunks, p.work.pulls_done, w.num_blocks())) {
    WorkQueue<A>::reset(w, p.work.pulls_next);
    A::template publish_to<Scope::system>(
        w, call.world(),
        [&](int r) {
          const bool has_reader = r == self || (ranks_without_readers >> r & 1) == 0;
          return FlagStore{has_reader ? reach<A>(call.heap, r, flag_of(self)) : nullptr, call.word()};
        },
        Site::pulled);
  }
  if (w.index() != 0) return true;
  WarpSpan<A> span(w, call, Event::wait_pulled, -1);
  const bool by_itself = (ranks_without_readers >> self & 1) != 0;
  const auto reader = [&](int i) { return by_itself ? self : i; };
  return wait_for<A>(
      w, call, by_itself ? 1 : call.world(), [&](int i) { return call.heap.local(flag_of(reader(i))); }, call.word(),
      Site::pulled, reader, span);
}

/// Owner side, after all placements have arrived: for the rows that were not ready in place, waits for chunk c and all earlier
/// chunks.
template <class A>
SWITCHYARD_FN bool wait_outputs(typename A::Warp& w, const CombineParams& p, int c) {
  const CallContext& call = p.call;
  const uint64_t late = A::lanes_where(w, call.world(), [&](int r) {
    return is_mapped<A>(call.heap, r) && call.heap.local(p.shape.control.placement(call.epoch, r))->pull.ready == 0;
  });
  if (late == 0) return true;
  WarpSpan<A> span(w, call, Event::wait_outputs, -1);
  const auto writer = [&](int i) { return nth_bit(late, i); };
  return wait_for<A>(
      w, call, bits(late), [&](int i) { return call.heap.local(p.shape.control.outputs_flag(writer(i), c)); }, call.word(),
      Site::outputs, writer, span);
}

/// Kernel body: run by all warps of a rank. Returns false after recording a fault. If a rank cannot take part (all_agree),
/// nothing is summed, but the call still ends on all ranks and the host raises the error. The call is complete when all warps
/// have returned. When warp 0 has returned, all warps of this rank have begun and have finished with the memory that peers
/// read.
template <class A>
SWITCHYARD_FN bool combine_pull(typename A::Warp& w, const CombineParams& p) {
  const CallContext& call = p.call;
  if (w.index() == 0) publish_placement<A>(w, call, p.shape.control, p.staging.place, p.staging.distances);
  if (!wait_placements<A>(w, call, p.shape.control, Site::placement)) return false;
  if (all_agree<A>(w, call, p.shape.control, p.staging.place.signature)) {
    if (!wait_outputs<A>(w, p, kSumChunks - 1)) return false;
    WarpSpan<A> span(w, call, Event::pull_reduce);
    pull_all<A>(w, p, MoveCounter{});
    span.set_arg(static_cast<int64_t>(call.moved[w.index()].payload_rows));
    span.set_bytes(call.moved[w.index()].remote_bytes);
  } else {
    call.moved[w.index()] = MoveCounter{};
  }
  return end_pulls<A>(w, p);
}

}  // namespace switchyard::detail

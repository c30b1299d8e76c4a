// SPDX-License-Identifier: Apache-2.0
// per_route combine of expert-major rows: each route's row is sent to the token's owner, which sums the rows in the order of
// the routes. A rank either pushes its rows to places in the owner's memory determined by token and route, or leaves them in
// place if owners can read them there. It pushes in chunks of the owners' tokens, while owners sum the chunks that have
// arrived. Some blocks push first; the others sum from the start. Records and tokens are assigned to warps dynamically
// (work_queue.hpp).
//
// | flag      | written by                           | read by         | order           | scope  | reuse              |
// | placement | each rank's warp 0, at once          | all ranks       | release/acquire | system | epoch, never reset |
// | outputs   | last of the warps that push, a chunk | owner's warps   | release/acquire | system | epoch, never reset |
// | pulled    | owner's last warp                    | expert's warp 0 | release/acquire | system | epoch, never reset |
//
// `pulled` is announced to ranks that leave their rows in place, and by each rank to itself; other ranks do not wait for it.
//
// Buffers: an owner's inbox is written between its `placement` and the writers' last `outputs`. The owner waits for all of
// these, so the memory may be reused when the call returns. Rows left in place are read until `pulled`. Progress: pushing waits
// only for placements, and a warp sums chunk c after `outputs` of all ranks that push.
#pragma once

#include "protocol/normal/combine_copies.hpp"

namespace switchyard::detail {

/// Bit mask of the ranks that push their rows.
template <class A>
SWITCHYARD_FN uint64_t pushing_ranks(typename A::Warp& w, const CombineParams& p) {
  const CallContext& call = p.call;
  return A::lanes_where(w, call.world(),
                        [&](int r) { return call.heap.local(p.shape.control.placement(call.epoch, r))->route.in_place == 0; });
}

/// Expert side: copies a part of the rows of one record to its owner's inbox. The copies are pending on return. \returns bytes
template <class A>
SWITCHYARD_FN int64_t push_record(typename A::Warp& w, const CombineParams& p, int owner, int64_t record, const RowPart& part) {
  const CallContext& call = p.call;
  const int32_t* const route = p.tables.record_route + record * p.shape.topk;
  const uint64_t inbox = call.heap.local(p.shape.control.placement(call.epoch, owner))->route.inbox;
  std::byte* const to =
      call.heap.base[owner] + inbox + int64_t{p.tables.record_token[record]} * p.shape.topk * p.shape.row_bytes + part.begin;
  const uint64_t kept = A::lanes_where(w, p.shape.topk, [&](int k) { return route[k] >= 0; });
  for (uint64_t left = kept; left != 0; left &= left - 1) {
    const int k = nth_bit(left, 0);
    A::copy(w, to + k * p.shape.row_bytes, p.shape.y + route[k] * p.shape.row_bytes + part.begin,
            static_cast<size_t>(part.bytes));
  }
  return bits(kept) * part.bytes;
}

/// Expert side: pushes the rows of those records of other owners that this warp claims; `warps` warps push. Owners are served
/// in turn, so that no link carries more than its share. The warp that completes a chunk announces it to all ranks.
template <class A>
SWITCHYARD_FN void push_rows(typename A::Warp& w, const CombineParams& p, const int32_t* begins, int warps) {
  const CallContext& call = p.call;
  const int world = call.world(), others = world - 1;
  WarpSpan<A> span(w, call, Event::return_rows);
  WorkQueue<A> turns(p.work.sums_next);
  int64_t base = 0, pushed = 0, bytes = 0;  // `base`: turns of earlier chunks
  for (int c = 0; c < kSumChunks; ++c) {
    const int32_t *const begin = begins + c * world, *const end = begin + world;
    const int parts = route_chunk_parts(c);
    int64_t rounds = 0;
    for (int r = 0; r < world; ++r)
      if (r != call.rank() && end[r] - begin[r] > rounds) rounds = end[r] - begin[r];
    for (;; turns.done()) {
      const int64_t turn = turns.item(w) - base;
      if (turn >= rounds * others * parts) break;
      const int64_t round = turn / (others * parts);
      const auto rest = static_cast<int>(turn - round * others * parts);
      const int owner = (call.rank() + 1 + rest % others) % world;
      if (round >= end[owner] - begin[owner]) continue;
      bytes += push_record<A>(w, p, owner, begin[owner] + round, part_of_row(p.shape.row_bytes, rest / others, parts));
      ++pushed;
    }
    base += rounds * others * parts;
    A::settle(w);
    if (!arrive_is_last<A>(w, p.work.of_block, c, p.work.sums_done + c, warps / w.warps_per_block())) continue;
    if (c == kSumChunks - 1) WorkQueue<A>::reset(w, p.work.sums_next);
    publish_chunk<A>(w, p, c);
  }
  span.set_arg(pushed);
  span.set_bytes(static_cast<uint64_t>(bytes));
}

/// Owner side: sums a part of token t from the rows of its routes. The stores are pending on return.
template <class A>
SWITCHYARD_FN void sum_routes(typename A::Warp& w, const CombineParams& p, int64_t t, const RowPart& part, MoveCounter& moved) {
  const CallContext& call = p.call;
  const TokenRows rows = rows_of(p, t);
  const auto row_of = [&](int i) -> const void* {
    const int rank = rows.rank(i);
    if (rank < 0) return nullptr;
    const int64_t at = p.tables.route_row[rows.first_route + i] * p.shape.row_bytes + part.begin;
    if (rank == call.rank()) return p.shape.y + at;
    const Placement& place = *call.heap.local(p.shape.control.placement(call.epoch, rank));
    return place.route.in_place == 0 ? p.staging.inbox + (rows.first_route + i) * p.shape.row_bytes + part.begin
                                     : offered(call.heap, rank, place.rows) + at;
  };
  sum_rows<A>(
      w, p, t, rows, row_of, [](int) -> const void* { return nullptr; }, moved, part);
}

/// Owner side: sums the tokens that this warp claims, from rows pushed by the ranks in `pushing` and rows left in place by the
/// others. Returns false after recording a fault.
template <class A>
SWITCHYARD_FN bool sum_tokens(typename A::Warp& w, const CombineParams& p, uint64_t pushing, MoveCounter& moved) {
  const CallContext& call = p.call;
  const uint64_t awaited = pushing & ~(uint64_t{1} << call.rank());  // this rank's own rows are read in place
  WorkQueue<A> tokens(p.work.pulls_next);
  int64_t base = 0;  // items of earlier chunks
  const auto writer = [&](int i) { return nth_bit(awaited, i); };
  for (int c = 0; c < kSumChunks; ++c) {
    {
      WarpSpan<A> span(w, call, Event::wait_outputs, -1);
      const auto flag = [&](int i) { return call.heap.local(p.shape.control.outputs_flag(writer(i), c)); };
      if (!wait_for<A>(w, call, bits(awaited), flag, call.word(), Site::outputs, writer, span, Wait::long_with_many))
        return false;
    }
    WarpSpan<A> span(w, call, Event::sum_returned);
    const MoveCounter before = moved;
    const int parts = route_chunk_parts(c);
    const int64_t first = c > 0 ? route_chunk_end(p.tokens, c - 1) : 0, items = (route_chunk_end(p.tokens, c) - first) * parts;
    for (int64_t i = 0; (i = tokens.item(w) - base) < items; tokens.done()) {
      const int64_t t = i / parts;
      sum_routes<A>(w, p, first + t, part_of_row(p.shape.row_bytes, static_cast<int>(i - t * parts), parts), moved);
    }
    base += items;
    span.set_arg(static_cast<int64_t>(moved.payload_rows - before.payload_rows));
    if (pushing == 0) span.set_bytes(moved.remote_bytes - before.remote_bytes);  // pushed rows have already arrived
  }
  A::settle(w);
  return true;
}

/// Kernel body: like combine_pull. All warps of a rank must be able to run at the same time.
template <class A>
SWITCHYARD_FN bool combine_routes(typename A::Warp& w, const CombineParams& p) {
  const CallContext& call = p.call;
  const int pushers = p.work.sum_blocks > 0 ? p.work.sum_blocks : w.num_blocks();
  const bool pushes = p.staging.place.route.in_place == 0 && call.world() > 1 && w.block() < pushers;
  uint64_t pushing = 0;
  MoveCounter moved;
  if (w.index() == 0) publish_placement<A>(w, call, p.shape.control, p.staging.place, p.staging.distances);
  const int32_t* const begins = pushes ? find_chunks<A>(w, p, route_chunk_end) : nullptr;
  if (!wait_placements<A>(w, call, p.shape.control, Site::placement)) return false;
  if (all_agree<A>(w, call, p.shape.control, p.staging.place.signature)) {
    if (pushes) push_rows<A>(w, p, begins, pushers * w.warps_per_block());
    pushing = pushing_ranks<A>(w, p);
    if (!sum_tokens<A>(w, p, pushing, moved)) return false;
  }
  call.moved[w.index()] = moved;
  return end_pulls<A>(w, p, pushing);
}

/// Kernel body of a combine with direct staging.
template <class A>
SWITCHYARD_FN bool combine_direct(typename A::Warp& w, const CombineParams& p) {
  if (p.shape.layout == Layout::rank_major)
    return p.staging.place.pull.ready == 0 ? combine_copies<A>(w, p) : combine_pull<A>(w, p);
  return p.shape.order == CombineOrder::per_route ? combine_routes<A>(w, p) : combine_sums<A>(w, p);
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Combine of rank-major rows in ordinary memory: the rank that holds the rows copies those that other ranks read to symmetric
// memory, from which the owners pull them (combine_pull.hpp). Copying and pulling overlap, because copies are announced in
// chunks of their owners' tokens. Some blocks copy first; the others pull from the start.
//
// | flag      | written by                        | read by         | order           | scope  | reuse              |
// | placement | expert's warp 0, at once          | all owners      | release/acquire | system | epoch, never reset |
// | outputs   | last of the warps that copy, a chunk | owner's warps | release/acquire | system | epoch, never reset |
// | pulled    | owner's last warp                 | expert's warp 0 | release/acquire | system | epoch, never reset |
//
// Buffers: peers read a rank's copies between its `outputs` and their `pulled`, so the memory may be reused when the call
// returns. Progress: copies do not wait, a warp pulls chunk c after `outputs` of the ranks that copy, and the wait for `pulled`
// is last.
#pragma once

#include "protocol/normal/combine_sums.hpp"

namespace switchyard::detail {

/// Expert side, with several hosts: copies the expert-major rows of `record`. The copies are pending on return.
template <class A>
SWITCHYARD_FN void copy_route_rows(typename A::Warp& w, const CombineParams& p, int64_t record, MoveCounter& moved) {
  const int32_t* const route = p.tables.record_route + record * p.shape.topk;
  const uint64_t kept = A::lanes_where(w, p.shape.topk, [&](int k) { return route[k] >= 0; });
  for (uint64_t left = kept; left != 0; left &= left - 1) {
    const int64_t at = route[nth_bit(left, 0)] * p.shape.row_bytes;
    A::copy(w, p.staging.staged + at, p.shape.y + at, static_cast<size_t>(p.shape.row_bytes));
  }
  moved.copied_bytes += static_cast<uint64_t>(bits(kept) * p.shape.row_bytes);
}

/// Expert side: copies the row and weights of `record` to symmetric memory if they are staged. The copies are pending on
/// return.
template <class A>
SWITCHYARD_FN void copy_record(typename A::Warp& w, const CombineParams& p, int owner, int64_t record, MoveCounter& moved) {
  const bool copies = p.staging.staged && !(p.staging.own_in_place && owner == p.call.rank());
  if constexpr (requires { A::kSpansHosts; }) {
    if (p.shape.layout == Layout::expert_major) {
      if (copies) copy_route_rows<A>(w, p, record, moved);
      return;
    }
  }
  if (copies) {
    const int64_t at = record * p.shape.row_bytes;
    A::copy(w, p.staging.staged + at, p.shape.y + at, static_cast<size_t>(p.shape.row_bytes));
    moved.copied_bytes += static_cast<uint64_t>(p.shape.row_bytes);
  }
  if (p.staging.weights_staged) {
    const int64_t at = record * p.shape.topk;
    A::copy(w, p.staging.weights_staged + at, p.shape.weights_in + at, 4 * static_cast<size_t>(p.shape.topk));
  }
}

/// Expert side: copies the records of all chunks that this warp claims; `warps` warps copy. The warp that completes a chunk
/// announces it to all ranks. If there are no more records than warps, the copies form a single step after which all chunks are
/// announced, because more steps would take longer than the copies.
template <class A>
SWITCHYARD_FN void make_copies(typename A::Warp& w, const CombineParams& p, int warps, MoveCounter& moved) {
  const int world = p.call.world();
  const bool one_step = p.num_records <= warps;
  WarpSpan<A> span(w, p.call, Event::reduce_local);
  const int32_t* const begins = find_chunks<A>(w, p, sum_chunk_end);
  const bool includes_own = !p.staging.own_in_place || p.staging.weights_staged != nullptr;
  WorkQueue<A> records(p.work.sums_next);
  int64_t base = 0, made = 0;  // `base`: records of earlier chunks
  for (int c = 0; c < kSumChunks; ++c) {
    const int32_t *const begin = begins + c * world, *const end = begin + world;
    const auto records_of = [&](int s) { return includes_own || s != p.call.rank() ? int64_t{end[s]} - begin[s] : 0; };
    for (;; records.done(), ++made) {
      const int64_t i = records.item(w) - base;
      const Located at = A::locate(w, i, world, records_of);
      if (at.segment == world) {
        base += i - at.offset;
        break;
      }
      copy_record<A>(w, p, at.segment, begin[at.segment] + at.offset, moved);
    }
    if (one_step && c + 1 < kSumChunks) continue;
    A::settle(w);
    if (!arrive_is_last<A>(w, p.work.of_block, c, p.work.sums_done + c, warps / w.warps_per_block())) continue;
    if (c + 1 == kSumChunks) WorkQueue<A>::reset(w, p.work.sums_next);
    for (int chunk = one_step ? 0 : c; chunk <= c; ++chunk) publish_chunk<A>(w, p, chunk);
  }
  span.set_arg(made);
}

/// Owner side: sums this warp's share of all tokens chunk by chunk, waiting for the rows that ranks copy. Returns false after
/// recording a fault. Settled on return. call.moved then contains `moved` plus the rows and bytes that this warp moved in this
/// function.
template <class A>
SWITCHYARD_FN bool pull_copies(typename A::Warp& w, const CombineParams& p, MoveCounter moved) {
  const PullItems share = pull_items(p.tokens, w.total(), p.shape.row_bytes);
  WorkQueue<A> items(p.work.pulls_next, A::kTakenAtOnce);
  for (int c = share.whole > 0 ? 0 : kSumChunks - 1; c < kSumChunks; ++c) {
    if (!wait_outputs<A>(w, p, c)) return false;
    const int64_t end = sum_chunk_end(p.tokens, c);
    WarpSpan<A> span(w, p.call, Event::pull_reduce);
    const MoveCounter before = moved;
    if (share.whole > 0) pull_and_reduce<A>(w, p, items, end < share.whole ? end : share.whole, moved);
    if (c + 1 == kSumChunks) {
      pull_rest<A>(w, p, share, items, moved);
      moved = p.call.moved[w.index()];
    }
    span.set_arg(static_cast<int64_t>(moved.payload_rows - before.payload_rows));
    span.set_bytes(moved.remote_bytes - before.remote_bytes);
  }
  return true;
}

/// Kernel body, like combine_pull, for a rank that stages rows or weights. All warps of a rank must be able to run at the same
/// time.
template <class A>
SWITCHYARD_FN bool combine_copies(typename A::Warp& w, const CombineParams& p) {
  const CallContext& call = p.call;
  MoveCounter moved;
  if (w.index() == 0)
    publish_placement<A>(w, call, p.shape.control, p.staging.place, p.staging.distances,
                         p.staging.own_in_place ? &p.staging.own_rows : nullptr);
  const int copiers = p.work.sum_blocks > 0 ? p.work.sum_blocks : w.num_blocks();
  if (w.block() < copiers) make_copies<A>(w, p, copiers * w.warps_per_block(), moved);
  if (!wait_placements<A>(w, call, p.shape.control, Site::placement)) return false;
  if (!all_agree<A>(w, call, p.shape.control, p.staging.place.signature))
    call.moved[w.index()] = moved;
  else if (!pull_copies<A>(w, p, moved))
    return false;
  return end_pulls<A>(w, p);
}

}  // namespace switchyard::detail

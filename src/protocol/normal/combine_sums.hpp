// SPDX-License-Identifier: Apache-2.0
// per_rank combine of expert-major rows: the rank that holds a token's experts sums their rows; the token's owner pulls these
// sums and adds them. Both steps overlap, because sums are computed and announced in chunks of their owners' tokens. Some
// blocks compute sums first; the others pull from the start. Records and tokens are assigned to warps dynamically
// (work_queue.hpp).
//
// | flag      | written by                          | read by         | order           | scope  | reuse              |
// | placement | expert's warp 0, at once            | all owners      | release/acquire | system | epoch, never reset |
// | outputs   | last of the warps that sum, a chunk | owner's warps   | release/acquire | system | epoch, never reset |
// | pulled    | owner's last warp                   | expert's warp 0 | release/acquire | system | epoch, never reset |
//
// Buffers: peers read a rank's sums between its `outputs` and their `pulled`, so the memory may be reused when the call
// returns. Progress: sums do not wait, a warp pulls chunk c after `outputs` of all ranks, and the wait for `pulled` is last.
#pragma once

#include "protocol/normal/combine_pull.hpp"

namespace switchyard::detail {

/// Scratch bytes per warp required by find_chunks.
SWITCHYARD_FN constexpr int64_t sum_scratch_bytes(int world) { return int64_t{4} * (kSumChunks + 1) * world; }

/// Writes the first record of each chunk to the warp's scratch: [kSumChunks + 1, W] by chunk and owner. `chunk_end(T, c)` is
/// one past the last token of chunk c.
template <class A, class ChunkEnd>
SWITCHYARD_FN const int32_t* find_chunks(typename A::Warp& w, const CombineParams& p, ChunkEnd&& chunk_end) {
  const int world = p.call.world();
  auto* const begins = reinterpret_cast<int32_t*>(w.scratch());
  A::for_lanes(w, (kSumChunks + 1) * world, [&](int i) {
    const int c = i / world, owner = i - c * world;
    begins[i] = static_cast<int32_t>(first_record_of(p, owner, c > 0 ? chunk_end(p.tables.tokens_of[owner], c - 1) : 0));
  });
  A::settle(w);
  return begins;
}

/// Expert side: announces to all ranks that chunk c is complete. Releases everything previously settled.
template <class A>
SWITCHYARD_FN void publish_chunk(typename A::Warp& w, const CombineParams& p, int c) {
  const CallContext& call = p.call;
  A::template publish_to<Scope::system>(
      w, call.world(),
      [&](int r) {
        return FlagStore{reach<A>(call.heap, r, p.shape.control.outputs_flag(call.rank(), c)), call.word()};
      },
      Site::outputs);
}

/// Expert side: computes the sums of all chunks that this warp claims; `warps` warps compute sums. The warp that completes a
/// chunk announces it to all ranks.
template <class A>
SWITCHYARD_FN void make_sums(typename A::Warp& w, const CombineParams& p, int warps, MoveCounter& moved) {
  const CallContext& call = p.call;
  const int world = call.world();
  WarpSpan<A> span(w, call, Event::reduce_local);
  const int32_t* const begins = find_chunks<A>(w, p, sum_chunk_end);
  WorkQueue<A> records(p.work.sums_next);
  int64_t base = 0, made = 0;  // `base`: records of earlier chunks
  for (int c = 0; c < kSumChunks; ++c) {
    const int32_t *const begin = begins + c * world, *const end = begin + world;
    for (;; records.done()) {
      const int64_t i = records.item(w) - base;
      const Located at = A::locate(w, i, world, [&](int s) { return int64_t{end[s]} - begin[s]; });
      if (at.segment == world) {
        base += i - at.offset;
        break;
      }
      const int64_t record = begin[at.segment] + at.offset;
      if (!reduce_record<A>(w, p, record, p.staging.staged + record * p.shape.row_bytes)) continue;
      moved.copied_bytes += static_cast<uint64_t>(p.shape.row_bytes);
      ++made;
    }
    A::settle(w);
    if (!arrive_is_last<A>(w, p.work.of_block, c, p.work.sums_done + c, warps / w.warps_per_block())) continue;
    if (c == kSumChunks - 1) WorkQueue<A>::reset(w, p.work.sums_next);
    publish_chunk<A>(w, p, c);
  }
  span.set_arg(made);
}

/// Owner side: waits for chunk c of the sums from all ranks.
template <class A>
SWITCHYARD_FN bool wait_sums(typename A::Warp& w, const CombineParams& p, int c) {
  WarpSpan<A> span(w, p.call, Event::wait_outputs, -1);
  return wait_ranks<A>(
      w, p.call, [&](int r) { return p.call.heap.local(p.shape.control.outputs_flag(r, c)); }, Site::outputs, span);
}

/// Owner side: sums the tokens that this warp claims. Returns false after recording a fault.
template <class A>
SWITCHYARD_FN bool pull_sums(typename A::Warp& w, const CombineParams& p, MoveCounter& moved) {
  WorkQueue<A> tokens(p.work.pulls_next);
  for (int c = 0; c < kSumChunks; ++c) {
    if (!wait_sums<A>(w, p, c)) return false;
    WarpSpan<A> span(w, p.call, Event::pull_reduce);
    const MoveCounter before = moved;
    pull_and_reduce<A>(w, p, tokens, sum_chunk_end(p.tokens, c), moved);
    span.set_arg(static_cast<int64_t>(moved.payload_rows - before.payload_rows));
    span.set_bytes(moved.remote_bytes - before.remote_bytes);
  }
  A::settle(w);
  return true;
}

/// Kernel body: like combine_pull. All warps of a rank must be able to run at the same time.
template <class A>
SWITCHYARD_FN bool combine_sums(typename A::Warp& w, const CombineParams& p) {
  const CallContext& call = p.call;
  MoveCounter moved;
  if (w.index() == 0) publish_placement<A>(w, call, p.shape.control, p.staging.place);
  const int makers = p.work.sum_blocks > 0 ? p.work.sum_blocks : w.num_blocks();
  if (p.staging.reduce_locally && w.block() < makers) make_sums<A>(w, p, makers * w.warps_per_block(), moved);
  if (!wait_placements<A>(w, call, p.shape.control, Site::placement)) return false;
  if (all_agree<A>(w, call, p.shape.control, p.staging.place.signature) && !pull_sums<A>(w, p, moved)) return false;
  call.moved[w.index()] = moved;
  return end_pulls<A>(w, p);
}

}  // namespace switchyard::detail

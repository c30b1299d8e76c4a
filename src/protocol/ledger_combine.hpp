// SPDX-License-Identifier: Apache-2.0
// Ledger combine: the ranks that hold experts return rows to the owners of their tokens, where the ledger says; every owner
// sums its tokens as their rows arrive.
//
// | flag        | written by                      | read by        | order           | scope  | reuse              |
// | ledger_rows | last warp with rows for owner   | owner's warps  | release/acquire | system | epoch, never reset |
// | local_sends | each warp with rows for owner   | the last one   | acquire-release | device | reset to 0         |
//
// Every rank sets its flag at every owner in every call, also without rows, and a call ends only when all its flags have come.
//
// Buffers: return buffers and signatures are doubled by the parity of the call. A rank writes those of call n + 2 at an owner
// only after it finished call n + 1, hence after it saw the owner's flag of call n + 1, which the owner set after it had
// finished call n, with all its warps. So nobody still reads what is overwritten; two buffers suffice, and nothing is cleared.
// A flag that is a call ahead also ends a wait: its writer's rows of call n were complete before it began call n + 1.
//
// Expert outputs are the rank's own memory and are read before it announces them: they may change when the call returns.
//
// Ranks whose ledgers differ write inside the return buffers all the same (tables are checked); what is summed then is
// unspecified, and the signatures beside the flags make every rank of such a pair end the call with a mismatch.
//
// Progress: returning rows waits for nothing; a warp waits only after it has returned its share. All warps of a rank must run.
#pragma once

#include "layout/ledger_layout.hpp"
#include "plan/ledger_work.hpp"
#include "protocol/wait.hpp"

namespace switchyard::detail {

/// Trivially copyable. Pointers are to this rank's memory. Functions take any type with these members: a kernel for one type of
/// rows makes that a constant.
struct LedgerParams {
  CallContext call;
  LedgerLayout layout;
  uint64_t signature = 0;  ///< of the call: equal on all ranks
  DType type = DType::f16;
  int64_t hidden = 0;
  int64_t row_bytes = 0;
  int topk = 0;

  // Expert side.
  const std::byte* y = nullptr;
  const LedgerChunk* chunks = nullptr;
  int64_t num_chunks = 0;
  const int32_t* chunks_of = nullptr;  ///< [W] by owner
  uint64_t* sends_done = nullptr;      ///< [W] chunks returned, by owner: private to this rank, 0 between calls

  // Owner side.
  int64_t tokens = 0;
  const int32_t* row_of = nullptr;       ///< [T * K] row of the return buffer, -1 none
  const uint64_t* senders_of = nullptr;  ///< [T] bit r: a row of the token comes from rank r
  const float* probs = nullptr;          ///< [T * K] or null
  std::byte* out = nullptr;
};

/// Tells the owners in `owners` (bits) that all their rows are there. With everything settled and arrived before.
template <class A, class P>
SWITCHYARD_FN void announce_returned(typename A::Warp& w, const P& p, uint64_t owners) {
  const CallContext& call = p.call;
  if (owners == 0) return;
  A::for_lanes(w, call.world(), [&](int r) {
    if (owners >> r & 1) *call.heap.at(r, p.layout.signature(call.epoch, call.rank())) = p.signature;
  });
  A::settle(w);
  A::template publish_to<Scope::system>(
      w, call.world(),
      [&](int r) {
        return FlagStore{owners >> r & 1 ? call.heap.at(r, p.layout.flag(call.rank())) : nullptr, call.word()};
      },
      Site::ledger_rows);
}

/// A chunk travels in so many parts, so that few rows keep many multiprocessors busy.
inline constexpr int kChunkParts = 4;

/// Returns this warp's share of the chunks; whoever completes an owner's tells it. Chunks of one owner lie together, and each
/// rank begins with another owner.
template <class A, class P>
SWITCHYARD_FN void return_segments(typename A::Warp& w, const P& p, MoveCounter& moved) {
  const CallContext& call = p.call;
  int owner = -1;
  uint64_t done = 0;  // parts for `owner` since it was turned to
  const auto arrive = [&] {
    A::settle(w);
    uint64_t* counter = p.sends_done + owner;
    const uint64_t before = A::template fetch_add<Scope::device>(w, counter, done, Site::local_sends);
    if (before + done != static_cast<uint64_t>(p.chunks_of[owner]) * kChunkParts) return;
    A::for_lanes(w, 1, [&](int) { *counter = 0; });
    announce_returned<A>(w, p, uint64_t{1} << owner);
  };
  for (int64_t i = spread_index(w); i < p.num_chunks * kChunkParts; i += w.total()) {
    const LedgerChunk c = p.chunks[i / kChunkParts];
    const auto part = static_cast<int>(i % kChunkParts);
    if (c.owner != owner) {
      if (owner >= 0) arrive();
      owner = c.owner;
      done = 0;
    }
    const int64_t whole = c.rows * p.row_bytes, width = round_up(whole / kChunkParts, 128);
    const int64_t at = part * width < whole ? part * width : whole;
    const int64_t bytes = part + 1 < kChunkParts && at + width < whole ? width : whole - at;
    A::copy(w, call.heap.at(owner, p.layout.buffer(call.epoch)) + c.to * p.row_bytes + at, p.y + c.from * p.row_bytes + at,
            static_cast<size_t>(bytes));
    ++done;
    if (part == 0) moved.rows += static_cast<uint64_t>(c.rows);
    (owner == call.rank() ? moved.local_bytes : moved.remote_bytes) += static_cast<uint64_t>(bytes);
  }
  if (owner >= 0) arrive();
}

/// Waits until the ranks in `senders` (bits) have returned this rank's rows.
template <class A, class P>
SWITCHYARD_FN bool wait_ledger_rows(typename A::Warp& w, const P& p, uint64_t senders) {
  if (senders == 0) return true;
  const WarpSpan<A> span(w, p.call, Event::wait_ledger_rows, -1);
  const auto writer = [&](int i) { return nth_bit(senders, i); };
  return wait_for<A>(
      w, p.call, bits(senders), [&, senders](int i) { return p.call.heap.local(p.layout.flag(nth_bit(senders, i))); },
      p.call.word(), Site::ledger_rows, writer);
}

/// Sums this warp's share of the tokens, each as soon as its own senders have returned its rows. Settled on return.
template <class A, class P>
SWITCHYARD_FN bool restore_tokens(typename A::Warp& w, const P& p) {
  const std::byte* buffer = p.call.heap.local(p.layout.buffer(p.call.epoch));
  uint64_t here = 0;  // senders whose rows this warp may read
  // Few tokens are summed in parts by many warps.
  const bool split = p.tokens < w.total();
  const int64_t width = split ? 512 : p.hidden, parts = split ? (p.hidden + 511) / 512 : 1;
  const auto element = static_cast<int64_t>(dtype_bytes(p.type));
  for (int64_t i = spread_index(w); i < p.tokens * parts; i += w.total()) {
    // 32 bits: GPUs divide them faster.
    const int64_t t = split ? static_cast<int64_t>(static_cast<uint32_t>(i) / static_cast<uint32_t>(parts)) : i;
    const int64_t column = (i - t * parts) * width, left = p.hidden - column, at = column * element;
    const uint64_t senders = p.senders_of[t];
    if (!wait_ledger_rows<A>(w, p, senders & ~here)) return false;
    here |= senders;
    const int32_t* row_of = p.row_of + t * p.topk;
    A::reduce_rows_from(
        w,
        ReduceSpec{p.out + t * p.row_bytes + at, nullptr, nullptr, 0, {nullptr, nullptr}, p.type, left < width ? left : width},
        p.topk, p.probs != nullptr,
        [&](int k) -> const void* { return row_of[k] >= 0 ? buffer + row_of[k] * p.row_bytes + at : nullptr; },
        [&](int k) { return p.probs[t * p.topk + k]; });
  }
  A::settle(w);
  return true;
}

/// After all flags have come: records a mismatch if a rank made another call.
template <class A, class P>
SWITCHYARD_FN bool check_signatures(typename A::Warp& w, const P& p) {
  const CallContext& call = p.call;
  const uint64_t other = A::lanes_where(
      w, call.world(), [&](int r) { return *call.heap.local(p.layout.signature(call.epoch, r)) != p.signature; });
  if (other == 0) return true;
  FaultRecord fault;
  fault.site = Site::ledger_rows;
  fault.mismatch = true;
  fault.awaited_rank = nth_bit(other, 0);
  record_fault<A>(w, call, fault);
  return false;
}

/// Kernel body: run by all warps of a rank. False after a fault (recorded). The call is complete when all warps have returned.
template <class A, class P>
SWITCHYARD_FN bool ledger_combine(typename A::Warp& w, const P& p) {
  const CallContext& call = p.call;
  MoveCounter moved;
  if (w.index() == 0) announce_returned<A>(w, p, A::lanes_where(w, call.world(), [&](int r) { return p.chunks_of[r] == 0; }));
  {
    WarpSpan<A> span(w, call, Event::return_segments);
    return_segments<A>(w, p, moved);
    span.set_arg(static_cast<int64_t>(moved.rows));
  }
  {
    const WarpSpan<A> span(w, call, Event::restore_tokens, p.tokens);
    if (!restore_tokens<A>(w, p)) return false;
  }
  call.moved[w.index()] = moved;
  if (w.index() != 0) return true;
  const uint64_t all = ~uint64_t{0} >> (64 - call.world());
  return wait_ledger_rows<A>(w, p, all) && check_signatures<A>(w, p);
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Ledger combine: the ranks that hold experts return rows to the owners of their tokens, at places defined by the ledger. Every
// owner sums its tokens as their rows arrive.
//
// | flag        | written by                    | read by       | order           | scope  | reuse                       |
// | ledger_rows | see below                     | owner's warps | release/acquire | system | epoch, never reset          |
// | returned    | a warp of an expert's rank    | owner's warps | none            | system | blank a call later          |
// | local_sends | each warp with rows for owner | the last one  | acquire-release | device | reset to 0                  |
//
// Every rank sets its flag at every owner in every call, even if it has no rows. A call ends only after the flags of all ranks
// have arrived.
//
// *Rows whose size is a multiple of 16 bytes* are sentinel rows (arch/ops.hpp; site `returned`). The flag announces only that a
// rank has entered the call, and with which ledger. Three return buffers are used in rotation. The buffer of call n keeps its
// contents until call n + 1, which blanks it. It is written again in call n + 3 by a rank that has finished call n + 2. That
// rank has therefore acquired the owner's flag of call n + 2, which the owner set after finishing call n + 1, including the
// blanking.
//
// *Other rows* are followed by the flag, which is set by the last warp with rows for an owner. Two buffers are used, selected
// by the parity of the call. A rank writes an owner's buffer of call n + 2 only after its own call n + 1 has ended. By then, it
// has acquired the owner's flag of call n + 1, which the owner set after all its warps had finished call n. The overwritten
// data is therefore no longer read, and nothing needs to be cleared. A flag that is one call ahead also ends a wait, because
// its writer's rows of call n were complete before it began call n + 1. Signatures are also double-buffered by parity, for both
// kinds of rows.
//
// Expert outputs are in the rank's own memory and are read before the rank announces them, so they may change when the call
// returns.
//
// Ranks whose ledgers differ still write only within the return buffers, because tables are checked. The resulting sums are
// unspecified, but the signatures beside the flags make both ranks of such a pair end the call, either with a mismatch that
// they detect or because the other rank aborts.
//
// Progress: returning rows does not wait, and a warp waits only after it has returned its share. All warps of a rank must run.
#pragma once

#include "layout/ledger_layout.hpp"
#include "plan/ledger_work.hpp"
#include "protocol/wait.hpp"

namespace switchyard::detail {

/// Trivially copyable. Pointers refer to this rank's memory. The functions below accept any type with these members, so that
/// kernels for one row type can use constants for some of them.
struct LedgerParams {
  CallContext call;
  LedgerLayout layout;
  uint64_t signature = 0;  ///< of the call; identical on all ranks
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
  int64_t* filled = nullptr;           ///< [2] rows of the return buffer that the last call of each parity filled

  // Owner side.
  int64_t tokens = 0;
  int64_t returned = 0;                  ///< number of returned rows
  bool some_unnamed = false;             ///< some of these rows are in no sum
  const int32_t* row_of = nullptr;       ///< [T * K] row of the return buffer; -1: none
  const uint64_t* senders_of = nullptr;  ///< [T] bit r: rank r returns a row of the token
  const uint8_t* sender_of = nullptr;    ///< [returned] the rank that returns each row
  const float* probs = nullptr;          ///< [T * K] or null
  std::byte* out = nullptr;
};

/// Sets `ledger_rows` at the owners in the bit mask `owners`. Releases everything that has previously settled and arrived.
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

/// Number of parts in which a chunk is copied; more than one lets a few rows keep many multiprocessors busy.
inline constexpr int kChunkParts = 4;

/// Returns this warp's share of the chunks; the warp that completes an owner's chunks announces them to that owner. The chunks
/// of one owner are contiguous, and each rank begins with a different owner.
template <class A, class P>
SWITCHYARD_FN void return_segments(typename A::Warp& w, const P& p, MoveCounter& moved) {
  const CallContext& call = p.call;
  const bool sentinels = p.layout.has_sentinel_rows();
  int owner = -1;
  uint64_t done = 0;  // parts done for the current `owner`
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
      if (owner >= 0 && !sentinels) arrive();
      owner = c.owner;
      done = 0;
    }
    const int64_t whole = c.rows * p.row_bytes, width = round_up(whole / kChunkParts, 128);
    const int64_t at = part * width < whole ? part * width : whole;
    const int64_t bytes = part + 1 < kChunkParts && at + width < whole ? width : whole - at;
    std::byte* const to = call.heap.at(owner, p.layout.buffer(call.epoch)) + c.to * p.row_bytes + at;
    const std::byte* const from = p.y + c.from * p.row_bytes + at;
    if (sentinels)
      A::multicast_sentinel(
          w, 1, [to](int) -> void* { return to; }, from, static_cast<size_t>(bytes), sentinel_copies());
    else
      A::copy(w, to, from, static_cast<size_t>(bytes));
    ++done;
    if (part == 0) moved.payload_rows += static_cast<uint64_t>(c.rows);
    (owner == call.rank() ? moved.local_bytes : moved.remote_bytes) += static_cast<uint64_t>(bytes);
  }
  if (owner >= 0 && !sentinels) arrive();
}

/// Waits until the ranks in the bit mask `senders` have returned this rank's rows.
template <class A, class P>
SWITCHYARD_FN bool wait_ledger_rows(typename A::Warp& w, const P& p, uint64_t senders) {
  if (senders == 0) return true;
  WarpSpan<A> span(w, p.call, Event::wait_ledger_rows, -1);
  const auto writer = [&](int i) { return nth_bit(senders, i); };
  return wait_for<A>(
      w, p.call, bits(senders), [&, senders](int i) { return p.call.heap.local(p.layout.flag(nth_bit(senders, i))); },
      p.call.word(), Site::ledger_rows, writer, span);
}

/// True if a rank has entered this call with a different ledger, in which case rows may never arrive. The mismatch is recorded.
template <class A>
struct EnteredOtherCall {
  template <class P>
  SWITCHYARD_FN bool operator()(typename A::Warp& w, const P* p) const {
    for (int r = 0; r < p->call.world(); ++r) {
      const uint64_t* flag = p->call.heap.local(p->layout.flag(r));
      if (!flag_reached(A::template load_acquire<Scope::system>(flag, Site::ledger_rows), p->call.word()) ||
          *p->call.heap.local(p->layout.signature(p->call.epoch, r)) == p->signature)
        continue;
      return !record_mismatch<A>(w, p->call, Site::ledger_rows, r);
    }
    return false;
  }
};

/// Waits until missing(looks) returns -1; before that, it returns the number of a missing row in the return buffer. Charges the
/// time to the rank that returns the row. Returns false after recording a fault.
template <class A, class P, class Missing>
SWITCHYARD_FN bool wait_for_arrival(typename A::Warp& w, const P& p, Missing&& missing) {
  constexpr int kLooks = 16;
  WarpSpan<A> span(w, p.call);
  WaitClock<A> clock;
  for (int looks = 0;; looks = kLooks) {
    const int32_t row = missing(looks);
    if (row < 0 && looks > 0) {
      clock.charge(w, p.call, clock.awaited());
      span.set_arg(clock.awaited());
    }
    if (row < 0) return true;
    if (looks == 0) span.begin(Event::wait_ledger_rows, -1);
    const int writer = p.sender_of[row];
    if (looks == 0)
      clock.begin(writer);
    else if (writer != clock.awaited())
      clock.charge(w, p.call, writer);
    const uint64_t* const flag = p.call.heap.local(p.layout.flag(writer));
    const Site site = flag_reached(A::peek(flag), p.call.word()) ? Site::returned : Site::ledger_rows;
    if (!clock.keep_waiting(w, p.call, site, flag, p.call.word()) ||
        (clock.is_check_due() && A::out_of_line(w, EnteredOtherCall<A>{}, &p))) {
      span.set_arg(clock.awaited());
      return false;
    }
  }
}

/// Computes `sum` for token t from its sentinel rows, starting at byte `at` of each row.
template <class A, class P>
SWITCHYARD_FN bool sum_if_arrived(typename A::Warp& w, const P& p, const ReduceSpec& sum, int64_t t, int64_t at) {
  const std::byte* const buffer = p.call.heap.local(p.layout.buffer(p.call.epoch));
  const int32_t* const row_of = p.row_of + t * p.topk;
  return wait_for_arrival<A>(w, p, [&](int looks) -> int32_t {
    const int missing = A::reduce_if_arrived(
        w, sum, p.topk, p.probs != nullptr,
        [&](int k) -> const void* { return row_of[k] >= 0 ? buffer + row_of[k] * p.row_bytes + at : nullptr; },
        [&](int k) { return p.probs[t * p.topk + k]; }, looks, sentinel_copies());
    return missing < 0 ? -1 : row_of[missing];
  });
}

/// Blanks the data of the previous call. Runs after all ranks have entered this call, so that all rows sent in the previous
/// call have arrived, including rows that no route uses. Settled on return.
template <class A, class P>
SWITCHYARD_FN void blank_last_rows(typename A::Warp& w, const P& p) {
  std::byte* const rows = p.call.heap.local(p.layout.buffer(p.call.epoch - 1));
  const int64_t bytes = p.filled[(p.call.epoch - 1) & 1] * p.row_bytes, width = 2048;
  for (int64_t at = spread_index(w) * width; at < bytes; at += w.total() * width)
    A::blank_row(w, rows + at, static_cast<size_t>(at + width < bytes ? width : bytes - at), sentinel_copies());
  A::settle(w);
}

/// If some rows are not part of any sum, waits for this warp's share of the entire return buffer, so that these rows have also
/// arrived.
template <class A, class P>
SWITCHYARD_FN bool wait_unnamed(typename A::Warp& w, const P& p) {
  if (!p.some_unnamed) return true;
  const std::byte* const buffer = p.call.heap.local(p.layout.buffer(p.call.epoch));
  for (int64_t row = spread_index(w); row < p.returned; row += w.total()) {
    const std::byte* const at = buffer + row * p.row_bytes;
    if (!wait_for_arrival<A>(w, p, [&](int) {
          return A::has_arrived(w, at, static_cast<size_t>(p.row_bytes), sentinel_copies()) ? -1 : static_cast<int32_t>(row);
        }))
      return false;
  }
  return true;
}

/// Sums this warp's share of the tokens, each as soon as its senders have returned its rows. Settled on return.
template <class A, class P>
SWITCHYARD_FN bool restore_tokens(typename A::Warp& w, const P& p) {
  const std::byte* buffer = p.call.heap.local(p.layout.buffer(p.call.epoch));
  uint64_t here = 0;  // senders whose rows this warp may read
  // With few tokens, warps sum parts of tokens instead of whole ones.
  const bool split = p.tokens < w.total();
  const int64_t width = split ? 512 : p.hidden, parts = split ? (p.hidden + 511) / 512 : 1;
  for (int64_t i = spread_index(w); i < p.tokens * parts; i += w.total()) {
    // 32 bits, because GPUs divide 32-bit numbers faster.
    const int64_t t = split ? static_cast<int64_t>(static_cast<uint32_t>(i) / static_cast<uint32_t>(parts)) : i;
    const int64_t column = (i - t * parts) * width, left = p.hidden - column,
                  at = static_cast<int64_t>(dtype_bytes(p.type, column));
    const ReduceSpec sum{p.out + t * p.row_bytes + at, nullptr, nullptr, 0, {nullptr, nullptr}, p.type,
                         left < width ? left : width};
    if (p.layout.has_sentinel_rows()) {
      if (!sum_if_arrived<A>(w, p, sum, t, at)) return false;
      continue;
    }
    const uint64_t senders = p.senders_of[t];
    if (!wait_ledger_rows<A>(w, p, senders & ~here)) return false;
    here |= senders;
    const int32_t* row_of = p.row_of + t * p.topk;
    A::template reduce_rows_from<kMaxTopk>(
        w, sum, p.topk, p.probs != nullptr,
        [&](int k) -> const void* { return row_of[k] >= 0 ? buffer + row_of[k] * p.row_bytes + at : nullptr; },
        [&](int k) { return p.probs[t * p.topk + k]; });
  }
  A::settle(w);
  return true;
}

/// After all flags have arrived, records a mismatch if any rank made a different call.
template <class A, class P>
SWITCHYARD_FN bool check_signatures(typename A::Warp& w, const P& p) {
  const CallContext& call = p.call;
  const uint64_t other = A::lanes_where(
      w, call.world(), [&](int r) { return *call.heap.local(p.layout.signature(call.epoch, r)) != p.signature; });
  if (other == 0) return true;
  return record_mismatch<A>(w, call, Site::ledger_rows, nth_bit(other, 0));
}

/// Kernel body: run by all warps of a rank. Returns false after recording a fault. The call is complete when all warps have
/// returned.
template <class A, class P>
SWITCHYARD_FN bool ledger_combine(typename A::Warp& w, const P& p) {
  const CallContext& call = p.call;
  const uint64_t all = ~uint64_t{0} >> (64 - call.world());
  const bool sentinels = p.layout.has_sentinel_rows();
  if (w.index() == 0) {
    announce_returned<A>(w, p, A::lanes_where(w, call.world(), [&](int r) { return sentinels || p.chunks_of[r] == 0; }));
    A::for_lanes(w, 1, [&](int) { p.filled[call.epoch & 1] = p.returned; });
  }
  {
    MoveCounter moved;
    WarpSpan<A> span(w, call, Event::return_segments);
    return_segments<A>(w, p, moved);
    span.set_arg(static_cast<int64_t>(moved.payload_rows));
    span.set_bytes(moved.remote_bytes);
    call.moved[w.index()] = moved;
  }
  // By now, usually all ranks have entered, so the previous call's data can be blanked while rows are in flight.
  const auto entered = [&](int r) { return call.heap.local(p.layout.flag(r)); };
  const bool early =
      sentinels && A::template poll_from<Scope::system>(w, call.world(), entered, call.word(), Site::ledger_rows) < 0;
  if (early) blank_last_rows<A>(w, p);
  {
    WarpSpan<A> span(w, call, Event::restore_tokens);
    if (!restore_tokens<A>(w, p) || (sentinels && !wait_unnamed<A>(w, p))) return false;
    span.set_arg(p.tokens);
  }
  if (early || (!sentinels && w.index() != 0)) return w.index() != 0 || check_signatures<A>(w, p);
  if (!wait_ledger_rows<A>(w, p, all)) return false;
  if (sentinels) blank_last_rows<A>(w, p);
  return w.index() != 0 || check_signatures<A>(w, p);
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// View of the symmetric heap for host and device code: the mapped base of every rank's segment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/macros.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

/// Typed offset into the symmetric heap, denoting the same object on every rank.
template <class T>
struct SymPtr {
  uint64_t offset = 0;
  SWITCHYARD_FN SymPtr operator+(int64_t n) const {
    return {offset + static_cast<uint64_t>(n * static_cast<int64_t>(sizeof(T)))};
  }
};

/// Trivially copyable; passed by value to kernels. Segments on other hosts have no address: their base is null.
struct HeapView {
  std::byte* base[kMaxRanks] = {};
  uint64_t bytes = 0;
  int rank = 0;
  int world = 1;

  /// Address of `p` in rank `r`'s segment, as mapped by this rank.
  template <class T>
  SWITCHYARD_FN T* at(int r, SymPtr<T> p) const {
    return reinterpret_cast<T*>(base[r] + p.offset);
  }
  template <class T>
  SWITCHYARD_FN T* local(SymPtr<T> p) const {
    return at(rank, p);
  }
  /// True if `p` is in this rank's own segment.
  bool contains(const void* p) const {
    const auto* b = static_cast<const std::byte*>(p);
    return b >= base[rank] && b < base[rank] + bytes;
  }
};

/// The start of every segment (for a group on GPUs, of its host memory; its GPU memory contains only the abort word).
/// allocate() never returns an offset below kHeapHeaderBytes.
struct HeapHeader {
  static constexpr int kCallsKept = 64;

  uint64_t abort_word;  ///< 0, or make_abort_word of the first failure seen; written by any rank, never cleared
  uint64_t left_ranks;  ///< bit r: rank r has left and delivers no data beyond what is already here; set by rank r. Host memory
  uint64_t left_ns;     ///< time when this rank left, on the reader's clock; a rank of another host only (kInFlightNs)
  /// This rank's calls, which its peers compare with their own: the number of calls so far, and the words of the latest ones
  /// (next_call_word), with that of call n at index n % kCallsKept. Written only by this rank, on entry to a call.
  alignas(64) uint64_t num_calls;
  uint64_t calls[kCallsKept];
  /// What this rank compared when it found that a peer made a different call, for the errors of other ranks on this host: the
  /// site (0: nothing), its own word and the peer's. Written once, by this rank's host thread.
  uint64_t difference[3];
};
inline constexpr size_t kHeapHeaderBytes = 4096;
/// Time for which data from a rank on another host may still be in flight after the report that it left, which takes another
/// path.
inline constexpr uint64_t kInFlightNs = 1'000'000'000;
static_assert(sizeof(HeapHeader) <= kHeapHeaderBytes);

/// {number:16, all earlier calls:24 (a hash), object:16, operation:8} of the collective call that follows `last`; numbers start
/// at 1. Identical on all ranks that have made the same calls in the same order.
constexpr uint64_t next_call_word(uint64_t last, uint64_t number, uint64_t object, int operation) {
  const uint64_t before = ((last ^ last >> 29) * 0x9e3779b97f4a7c15u) >> 40;
  return number << 48 | before << 24 | (object & 0xffff) << 8 | static_cast<uint64_t>(operation & 0xff);
}
constexpr int called_object(uint64_t word) { return static_cast<int>((word >> 8) & 0xffff); }
constexpr int called_operation(uint64_t word) { return static_cast<int>(word & 0xff); }

/// Two ranks' calls with the same number.
struct CallPair {
  uint64_t number = 0, mine = 0, theirs = 0;
  /// True if these calls or any earlier ones differ.
  bool differ() const { return mine != theirs && mine >> 48 == theirs >> 48; }
};
/// The call that is `back` calls before the last one reached by both ranks; back < kCallsKept. `peek` reads a word that its
/// owner may be writing concurrently.
template <class Peek>
CallPair calls_of_both(const HeapHeader& mine, const HeapHeader& theirs, Peek&& peek, uint64_t back = 0) {
  const uint64_t here = peek(&mine.num_calls), there = peek(&theirs.num_calls), last = here < there ? here : there;
  if (last < back) return {};
  const uint64_t at = (last - back) % HeapHeader::kCallsKept;
  return {last - back, peek(&mine.calls[at]), peek(&theirs.calls[at])};
}

/// {1:1, unused, left:1, awaited rank:8 (255: none), reason:8, rank:8}; nonzero for every (rank, reason).
constexpr uint64_t make_abort_word(int rank, int reason, int awaited = 255) {
  return (uint64_t{1} << 63) | (static_cast<uint64_t>(awaited & 0xff) << 16) | (static_cast<uint64_t>(reason & 0xff) << 8) |
         static_cast<uint64_t>(rank & 0xff);
}
/// The abort word for a rank that left while others still needed it. The other ranks treat the departure as if its process had
/// ended (ErrorCode::system).
constexpr uint64_t make_left_word(int rank, int reason) { return make_abort_word(rank, reason) | uint64_t{1} << 24; }
constexpr bool abort_is_left(uint64_t word) { return (word >> 24 & 1) != 0; }
constexpr int abort_rank(uint64_t word) { return static_cast<int>(word & 0xff); }
constexpr int abort_reason(uint64_t word) { return static_cast<int>((word >> 8) & 0xff); }
constexpr int abort_awaited(uint64_t word) { return static_cast<int>((word >> 16) & 0xff); }

}  // namespace switchyard::detail

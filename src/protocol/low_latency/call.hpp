// SPDX-License-Identifier: Apache-2.0
// Code shared by low-latency dispatch and combine: entering a call, and iterating over pieces.
//
// | flag         | written by | read by      | order           | scope  | reuse                                    |
// | call_header  | each rank  | all ranks    | release/acquire | system | epoch; two sets by parity of the call    |
//
// Functions accept parameters and layouts of any type with these members; kernels for one kind of rows use constants for some
// of them (exchange/low_latency/known.cuh).
//
// Every rank announces to all peers that it has entered call n before it waits for anything in that call, and leaves it only
// after all peers have announced the same. A peer is therefore at most one call ahead, and its writes for call n + 1 go to the
// other set.
#pragma once

#include <iterator>

#include "base/call_signature.hpp"
#include "layout/low_latency.hpp"
#include "protocol/wait.hpp"

namespace switchyard::detail {

/// A flat index over (item, piece), with pieces varying fastest. All indices are below 2^32.
struct ItemPiece {
  int64_t item;
  int piece;
};
template <class Layout>
SWITCHYARD_FN ItemPiece split_index(int64_t i, const Layout& l) {
  const auto index = static_cast<uint32_t>(i), item = l.by_pieces.quotient(index);
  return {item, static_cast<int>(index - item * l.by_pieces.value())};
}

/// Like spread_index, for received items. The order is reversed: the last warps, which had nothing to send, get the first items
/// and already wait while the others send.
template <class Warp>
SWITCHYARD_FN int64_t receiving_index(const Warp& w) {
  return w.total() - 1 - spread_index(w);
}

/// Kind of the call that a rank has entered: 5 bits of its header word. Identical on all ranks that make the same call.
enum class LowLatencyKind : uint8_t { dispatch = 0, combine = 1, all_to_all = 2 };
/// `option`: one bit. Combine: its order; other kinds: whether the call has a SlotSelector.
SWITCHYARD_FN inline uint64_t low_latency_kind(LowLatencyKind kind, uint64_t option, DType type) {
  return static_cast<uint64_t>(kind) + 4 * option + 8 * static_cast<uint64_t>(type);
}
SWITCHYARD_FN inline uint64_t combine_kind(CombineOrder order, DType type) {
  return low_latency_kind(LowLatencyKind::combine, static_cast<uint64_t>(order), type);
}
/// In a header value, the kind is above these bits. The bits below contain, in a combine, the low bits of the number of the
/// dispatch whose rows it sums, which are identical on all ranks; in other calls, sent_detail().
inline constexpr int kHeaderDetailBits = kFlagValueBits - 5;
static_assert(8 * std::size(NamesOf<DType>::kAll) <= 32, "5 bits of a header word hold kind, option and type");
/// T, which may differ by rank, occupies this number of low bits of a header value.
inline constexpr int kHeaderTokenBits = 16;
inline constexpr int64_t kMaxLowLatencyTokens = 65535;  // the maximum that check_config allows
static_assert(kMaxLowLatencyTokens >> kHeaderTokenBits == 0, "T travels in a header word, and in expert_count");
static_assert(kHeaderTokenBits + kMapVersionBits <= kHeaderDetailBits);
/// `map_version`: SlotTable::version() in a call with a SlotSelector, else 0. All ranks compare its low bits.
SWITCHYARD_FN inline uint64_t sent_detail(uint32_t map_version, int tokens) {
  return uint64_t{compared_version(map_version)} << kHeaderTokenBits | static_cast<uint64_t>(tokens);
}
SWITCHYARD_FN inline int tokens_in(uint64_t header_value) {
  return static_cast<int>(header_value & ((uint64_t{1} << kHeaderTokenBits) - 1));
}
SWITCHYARD_FN inline uint64_t header_value(uint64_t kind, uint64_t detail) {
  return kind << kHeaderDetailBits | (detail & ((uint64_t{1} << kHeaderDetailBits) - 1));
}

/// True for the warp that announces to all ranks that this rank has entered a call. It is chosen such that it has little to
/// send.
template <class Warp>
SWITCHYARD_FN bool is_announcer(const Warp& w) {
  return w.warp() == 0 && w.block() + 1 == w.num_blocks();
}

/// Announces to all ranks that this rank has entered the call. Call first, from all warps; the warp for which is_announcer()
/// returns true writes the flags. `value`: header_value.
template <class A, class Layout>
SWITCHYARD_FN void enter_call(typename A::Warp& w, const CallContext& call, const Layout& layout, uint64_t value) {
  if (!is_announcer(w)) return;
  A::publish_entry(
      w, call.world(),
      [&](int r) {
        return FlagStore{reach<A>(call.heap, r, layout.header(call.epoch, call.rank())), flag_word(call.epoch, value)};
      },
      Site::call_header);
}

/// Records that `rank`, whose header value is `theirs`, made a different call than this rank. \returns false
template <class A>
struct RecordMismatch {
  SWITCHYARD_FN bool operator()(typename A::Warp& w, const CallContext* call, int rank, uint64_t mine, uint64_t theirs) const {
    return record_mismatch<A>(w, *call, Site::call_header, rank, mine, theirs);
  }
};

/// Waits until all ranks have entered the same call, i.e. until their header values equal this rank's except in the lowest
/// `own_bits` bits. Every warp waits. `stored`: compares the header that this rank's sending half has written instead of
/// `value`, because only that half has the version of the map.
template <class A, class Layout>
SWITCHYARD_FN bool wait_entered(typename A::Warp& w, const CallContext& call, const Layout& layout, uint64_t value,
                                int own_bits, bool stored = false) {
  WarpSpan<A> span(w, call, Event::wait_entered, -1);
  const auto header = [&](int r) { return call.heap.local(layout.header(call.epoch, r)); };
  if (!wait_for<A>(
          w, call, call.world(), header, call.word(), Site::call_header, [](int r) { return r; }, span))
    return false;
  if (stored) value = flag_value(*header(call.rank()));
  const uint64_t others =
      A::lanes_where(w, call.world(), [&](int r) { return flag_value(*header(r)) >> own_bits != value >> own_bits; });
  if (others == 0) return true;
  const int other = nth_bit(others, 0);
  return A::out_of_line(w, RecordMismatch<A>{}, &call, other, value, flag_value(*header(other)));
}

/// T of rank r in a dispatch or flat exchange; valid after wait_entered.
SWITCHYARD_FN inline int tokens_of(const CallContext& call, const LowLatencyLayout& layout, int r) {
  const uint64_t word = *call.heap.local(layout.header(call.epoch, r));
  return tokens_in(flag_value(word));
}

/// Reads the user's ids, 32 or 64 bits wide; any id that is not an expert is read as -1.
struct IdReader {
  const void* ids = nullptr;
  bool is_int64 = false;
  int32_t experts = 0;

  SWITCHYARD_FN int64_t raw(int64_t f) const {
    return is_int64 ? static_cast<const int64_t*>(ids)[f] : static_cast<const int32_t*>(ids)[f];
  }
  SWITCHYARD_FN int32_t expert_of(int64_t id) const { return id >= 0 && id < experts ? static_cast<int32_t>(id) : -1; }
  /// True if `id` is neither an expert nor -1.
  SWITCHYARD_FN bool is_invalid(int64_t id) const { return expert_of(id) < 0 && id != -1; }
  SWITCHYARD_FN int32_t operator()(int64_t f) const { return expert_of(raw(f)); }
};

/// For each expert, the set of the tokens that choose it, with one bit per token. With the sets, counting is a lookup; without
/// them, the ids are scanned.
struct TokenSets {
  const uint32_t* sets = nullptr;  ///< [experts, words]
  int words = 0;                   ///< words_for(tokens)

  static SWITCHYARD_FN constexpr int words_for(int tokens) { return (tokens + 31) / 32; }
  SWITCHYARD_FN bool ready() const { return sets != nullptr; }
  /// Number of tokens, among the first `tokens`, that choose the expert; each token counts once.
  SWITCHYARD_FN int count(int32_t expert, int tokens) const {
    const uint32_t* const set = sets + int64_t{expert} * words;
    return count_in([set](int i) { return set[i]; }, tokens);
  }

 protected:
  /// Counts the members of the set whose words are word(i).
  template <class Word>
  static SWITCHYARD_FN int count_in(Word&& word, int tokens) {
    int n = 0;
    SWITCHYARD_UNROLLED_BY_4
    for (int i = 0; i * 32 < tokens; ++i) {
      const int left = tokens - i * 32;
      n += bits(word(i) & (left < 32 ? (1u << left) - 1 : ~0u));
    }
    return n;
  }
};

}  // namespace switchyard::detail

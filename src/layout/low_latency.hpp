// SPDX-License-Identifier: Apache-2.0
// Shared and private buffers of low-latency mode, defined once for host and device.
//
// A *unit* is one message from a source to a rank: a token (Sending::per_rank) or a route. A *piece* is a range of a row's
// columns that one warp places, answers or sums separately. Everything written by a peer is double-buffered by the parity of
// the call; docs/design/0013-low-latency-buffers.md explains why two sets suffice.
#pragma once

#include <cstdint>

#include "base/exact_division.hpp"
#include "layout/heap_view.hpp"
#include "layout/addressing.hpp"

namespace switchyard::detail {

inline constexpr int kMaxPieces = 16;

/// Description of one route in a message.
struct alignas(16) LowLatencyEntry {
  int32_t expert;  ///< -1: no expert
  int32_t index;   ///< of the (token, expert) pair among those of its source to this expert; kAlias: repeats an earlier k
  float weight;
  int32_t k;

  static constexpr int32_t kAlias = 1 << 30;
  SWITCHYARD_FN bool alias() const { return (index & kAlias) != 0; }
  SWITCHYARD_FN int32_t place() const { return index & ~kAlias; }
};

/// Position of a route's row on this rank; used by combine. [W, max_tokens, K]
struct LowLatencyRoute {
  int32_t row;  ///< in the output's rows; -1: not on this rank
  float weight;
};

/// Data that a dispatch into an output stores for its combine in addition to ids and weights.
struct OwnDispatch {
  int64_t tokens;
  uint64_t call;  ///< its epoch
};

/// Byte layout of the symmetric region of one object.
struct LowLatencyLayout {
  static constexpr int64_t kLine = 64;

  uint64_t base = 0;  ///< heap offset
  ExpertRanges map;
  int experts_base = 0, experts_extra = 0;  ///< quotient and remainder of experts / world, since kernels do not divide
  int topk = 1;
  int entries = 1;  ///< per message: K, or 1 if routes are sent singly
  // 32 bits suffice: rows have at most 2^20 columns, and ranks have at most 65 535 tokens.
  int max_tokens = 0;
  int hidden = 0;
  int payload_bytes = 0;  ///< per row, as sent
  int scale_bytes = 0;    ///< used bytes of its scales, without padding
  int return_bytes = 0;   ///< per returned row
  int pieces = 1;
  int piece_columns = 0;
  Divisor by_each, by_wide;  ///< experts_base and experts_base + 1
  Divisor by_topk;           ///< of indices over all routes of a rank
  Divisor by_pieces;         ///< of indices over all pieces that a rank can send or receive

  SWITCHYARD_FN int world() const { return map.world; }
  SWITCHYARD_FN int first_expert(int rank) const { return rank * experts_base + (rank < experts_extra ? rank : experts_extra); }
  SWITCHYARD_FN int experts_of(int rank) const { return experts_base + (rank < experts_extra ? 1 : 0); }
  /// kFast requires that both divisors are fast.
  template <bool kFast = false>
  SWITCHYARD_FN int owner(int32_t expert) const {
    const auto e = static_cast<uint32_t>(expert), extra = static_cast<uint32_t>(experts_extra);
    const uint32_t wide = extra * by_wide.value();
    const auto quotient = [](const Divisor& by, uint32_t n) { return kFast ? by.quotient_fast(n) : by.quotient(n); };
    return static_cast<int>(e < wide ? quotient(by_wide, e) : extra + quotient(by_each, e - wide));
  }
  SWITCHYARD_FN int units_per_token() const { return entries == topk ? 1 : topk; }
  SWITCHYARD_FN int max_units() const { return at.units; }
  SWITCHYARD_FN int token_of(int unit) const {
    return entries == topk ? unit : static_cast<int>(by_topk.quotient(static_cast<uint32_t>(unit)));
  }
  /// The first of its token's choices that the unit covers.
  SWITCHYARD_FN int first_k_of(int unit) const { return unit - token_of(unit) * units_per_token(); }
  SWITCHYARD_FN int64_t rows_per_expert() const { return int64_t{max_tokens} * world(); }
  SWITCHYARD_FN int column(int piece) const {
    const int c = piece * piece_columns;
    return c < hidden ? c : hidden;
  }

  /// Values derived from the sizes above, computed once by place().
  struct Offsets {
    int scales = 0, entries = 0, message_bytes = 0;   // in a message: payload, scales, entries
    int units = 0;                                    // of a rank
    int64_t counts = 0, messages = 0, set_words = 0;  // words of a set: headers, counts, messages
    int64_t return_rows = 0, set_bytes = 0;           // bytes of a set's staging: messages, returned rows
    int64_t flags_bytes = 0;
    int return_stride = 0;
    int slots = 1;  // maximum rows returned per token
  } at;

  /// Completes the layout. Flags: headers [2][W], counts [2][local experts][W], messages [2][W][units].
  void place() {
    experts_base = map.experts / map.world;
    experts_extra = map.experts % map.world;
    const auto each = static_cast<uint32_t>(experts_base);
    by_each = Divisor(each > 0 ? each : 1, static_cast<uint64_t>(map.experts));
    by_wide = Divisor(each + 1, static_cast<uint64_t>(map.experts));
    const int64_t items = rows_per_expert() * (topk > experts_of(0) ? topk : experts_of(0)) * pieces;
    constexpr int64_t kWarps = int64_t{1} << 20;  // an index may exceed the last item by the number of warps
    by_pieces = Divisor(static_cast<uint32_t>(pieces), static_cast<uint64_t>(items + kWarps));
    at.slots = topk > world() ? topk : world();
    by_topk = Divisor(static_cast<uint32_t>(topk), static_cast<uint64_t>(max_tokens) * static_cast<uint64_t>(topk));
    at.units = max_tokens * units_per_token();
    const auto lines = [](int64_t bytes) { return static_cast<int>(round_up(bytes, 128)); };
    at.scales = lines(payload_bytes);
    at.entries = at.scales + lines(scale_bytes);
    at.message_bytes = at.entries + lines(entries * static_cast<int64_t>(sizeof(LowLatencyEntry)));
    at.counts = int64_t{world()} * (kLine / 8);
    at.messages = at.counts + int64_t{experts_of(0)} * world();
    at.set_words = at.messages + int64_t{world()} * max_units();
    at.flags_bytes = round_up(2 * at.set_words * 8, 4096);
    at.return_rows = int64_t{world()} * max_units() * at.message_bytes;
    at.return_stride = lines(return_bytes);
    at.set_bytes = at.return_rows + int64_t{max_tokens} * at.slots * at.return_stride;
  }

  SWITCHYARD_FN int scales_at() const { return at.scales; }
  SWITCHYARD_FN int entries_at() const { return at.entries; }
  SWITCHYARD_FN int64_t flags_bytes() const { return at.flags_bytes; }
  SWITCHYARD_FN int64_t staging_bytes() const { return 2 * at.set_bytes; }
  /// Calls f(offset, bytes) for the memory that, in addition to the flags, must be zero before the first call.
  template <class F>
  void for_each_sentinel_row(F&& f) const {
    for (int set = 0; set < 2; ++set) f(at.flags_bytes + set * at.set_bytes + at.return_rows, at.set_bytes - at.return_rows);
  }
  SWITCHYARD_FN int64_t bytes() const { return flags_bytes() + staging_bytes(); }

  /// The kind of call that rank `writer` has entered, and the call's T or the dispatch that it combines.
  SWITCHYARD_FN SymPtr<uint64_t> header(uint64_t epoch, int writer) const { return word(epoch, writer * (kLine / 8)); }
  /// Number of rows that `writer` sends to one of the reader's experts.
  SWITCHYARD_FN SymPtr<uint64_t> expert_count(uint64_t epoch, int local_expert, int writer) const {
    return word(epoch, at.counts + int64_t{local_expert} * world() + writer);
  }
  /// Flag of a message: value 1 if it has arrived, 0 if it is not for this rank.
  SWITCHYARD_FN SymPtr<uint64_t> arrival(uint64_t epoch, int writer, int unit) const {
    return word(epoch, at.messages + (writer * max_units() + unit));
  }
  SWITCHYARD_FN SymPtr<std::byte> message(uint64_t epoch, int writer, int unit) const {
    return staging(epoch, int64_t{writer * max_units() + unit} * at.message_bytes);
  }
  /// Sentinel rows; zero when no call is in flight.
  SWITCHYARD_FN SymPtr<std::byte> return_row(uint64_t epoch, int t, int slot) const {
    return staging(epoch, at.return_rows + int64_t{t * at.slots + slot} * at.return_stride);
  }

 private:
  SWITCHYARD_FN SymPtr<uint64_t> word(uint64_t epoch, int64_t index) const {
    return {base + static_cast<uint64_t>(((epoch & 1) != 0 ? at.set_words + index : index) * 8)};
  }
  SWITCHYARD_FN SymPtr<std::byte> staging(uint64_t epoch, int64_t offset) const {
    return {base + static_cast<uint64_t>(at.flags_bytes + ((epoch & 1) != 0 ? at.set_bytes + offset : offset))};
  }
};

/// Positions of a row's scales in an output.
struct ScalePlace {
  bool column_major = false;
  int element_bytes = 4;  ///< 4: float32, 1: UE8M0
  int64_t groups = 0;     ///< per row
  int64_t row_bytes = 0;  ///< row-major: padded
  int64_t rows_per_expert = 0;

  SWITCHYARD_FN int64_t bytes_per_expert() const {
    return column_major ? words() * column_rows() * 4 : row_bytes * rows_per_expert;
  }
  /// Number of words in a column of scales, rounded up so that every column is aligned to 16 bytes.
  SWITCHYARD_FN int64_t column_rows() const { return (rows_per_expert + 3) / 4 * 4; }
  /// Number of int32 or float32 words per row if column-major.
  SWITCHYARD_FN int64_t words() const { return (groups * element_bytes + 3) / 4; }
  /// Bytes per row, including padding.
  SWITCHYARD_FN int64_t bytes_of_row() const { return column_major ? words() * 4 : row_bytes; }
  /// Start of the scales of row `row` in the entire output.
  SWITCHYARD_FN int64_t begin_of(int64_t row) const {
    if (!column_major) return row * row_bytes;
    const auto r = static_cast<uint32_t>(row), rows = static_cast<uint32_t>(rows_per_expert);  // 32 bits, as in LowLatencyRoute
    return int64_t{r / rows} * bytes_per_expert() + int64_t{r % rows} * 4;
  }
  /// Offset of byte `b` of a row, relative to begin_of().
  SWITCHYARD_FN int64_t offset_of(int64_t b) const { return column_major ? b / 4 * column_rows() * 4 + b % 4 : b; }
};

}  // namespace switchyard::detail

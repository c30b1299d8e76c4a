// SPDX-License-Identifier: Apache-2.0
// Shared and private buffers of low-latency mode, described once for host and device.
//
// A *unit* is what a source sends as one message to a rank: a token (Sending::per_rank) or a route. A *piece* is a range of a
// row's channels that one warp handles on its own. Everything that a peer writes is doubled by the parity of the call; see
// docs/design/0013-low-latency-buffers.md for why two sets suffice.
#pragma once

#include <cstdint>

#include "layout/heap_view.hpp"
#include "plan/addressing.hpp"

namespace switchyard::detail {

inline constexpr int kMaxPieces = 16;

/// What a message says of one route.
struct alignas(16) LowLatencyEntry {
  int32_t expert;  ///< -1: no expert
  int32_t index;   ///< of the (token, expert) pair among those of its source to this expert; kAlias: repeats an earlier k
  float weight;
  int32_t k;

  static constexpr int32_t kAlias = 1 << 30;
  SWITCHYARD_FN bool alias() const { return (index & kAlias) != 0; }
  SWITCHYARD_FN int32_t place() const { return index & ~kAlias; }
};

/// Where a route's row lies on this rank, for combine. [W, max_tokens, K]
struct LowLatencyRoute {
  int32_t row;  ///< in the output's rows; -1: not here
  float weight;
};

/// Byte layout of the symmetric region of one object.
struct LowLatencyLayout {
  static constexpr int64_t kLine = 64;

  uint64_t base = 0;  ///< heap offset
  ExpertMap map;
  int topk = 1;
  int entries = 1;  ///< per message: K, or 1 if routes travel alone
  int64_t max_tokens = 0;
  int64_t hidden = 0;
  int64_t payload_bytes = 0;  ///< of a row as it is sent
  int64_t scale_bytes = 0;    ///< used bytes of its scales, without padding
  int64_t return_bytes = 0;   ///< of a row that comes back
  int pieces = 1;
  int64_t piece_columns = 0;

  SWITCHYARD_FN int world() const { return map.world; }
  SWITCHYARD_FN int units_per_token() const { return topk / entries; }
  SWITCHYARD_FN int64_t max_units() const { return max_tokens * units_per_token(); }
  SWITCHYARD_FN int64_t rows_per_expert() const { return max_tokens * world(); }
  SWITCHYARD_FN int64_t column(int piece) const {
    const int64_t c = piece * piece_columns;
    return c < hidden ? c : hidden;
  }

  // A message: payload, scales, entries.
  SWITCHYARD_FN int64_t scales_at() const { return round_up(payload_bytes, 128); }
  SWITCHYARD_FN int64_t entries_at() const { return scales_at() + round_up(scale_bytes, 128); }
  SWITCHYARD_FN int64_t message_bytes() const {
    return entries_at() + round_up(entries * static_cast<int64_t>(sizeof(LowLatencyEntry)), 128);
  }

  // Flags: headers [2][W], counts [2][experts here][W], pieces [2][W][units][P], returns [2][T][slots][P].
  SWITCHYARD_FN int64_t slots() const { return topk > world() ? topk : world(); }  ///< rows that can come back for a token
  SWITCHYARD_FN int64_t header_words() const { return int64_t{world()} * (kLine / 8); }
  SWITCHYARD_FN int64_t count_words() const { return int64_t{map.max_count()} * world(); }
  SWITCHYARD_FN int64_t piece_words() const { return world() * max_units() * pieces; }
  SWITCHYARD_FN int64_t return_words() const { return max_tokens * slots() * pieces; }
  SWITCHYARD_FN int64_t set_words() const { return header_words() + count_words() + piece_words() + return_words(); }
  SWITCHYARD_FN int64_t flags_bytes() const { return round_up(2 * set_words() * 8, 4096); }
  SWITCHYARD_FN int64_t messages_bytes() const { return world() * max_units() * message_bytes(); }
  SWITCHYARD_FN int64_t returns_bytes() const { return max_tokens * slots() * round_up(return_bytes, 128); }
  SWITCHYARD_FN int64_t staging_bytes() const { return 2 * (messages_bytes() + returns_bytes()); }
  SWITCHYARD_FN int64_t bytes() const { return flags_bytes() + staging_bytes(); }

  /// T and kind of the call that rank `writer` has entered.
  SWITCHYARD_FN SymPtr<uint64_t> header(uint64_t epoch, int writer) const { return word(epoch, writer * (kLine / 8)); }
  /// Rows that `writer` sends to one of the reader's experts.
  SWITCHYARD_FN SymPtr<uint64_t> expert_count(uint64_t epoch, int local_expert, int writer) const {
    return word(epoch, header_words() + int64_t{local_expert} * world() + writer);
  }
  /// A piece of a message has arrived (value 1), or the message is not for this rank (value 0).
  SWITCHYARD_FN SymPtr<uint64_t> piece(uint64_t epoch, int writer, int64_t unit, int piece) const {
    return word(epoch, header_words() + count_words() + (writer * max_units() + unit) * pieces + piece);
  }
  /// A piece of a row has come back to slot `slot` of token t.
  SWITCHYARD_FN SymPtr<uint64_t> returned(uint64_t epoch, int64_t t, int64_t slot, int piece) const {
    return word(epoch, header_words() + count_words() + piece_words() + (t * slots() + slot) * pieces + piece);
  }
  SWITCHYARD_FN SymPtr<std::byte> message(uint64_t epoch, int writer, int64_t unit) const {
    return staging(epoch, (writer * max_units() + unit) * message_bytes());
  }
  SWITCHYARD_FN SymPtr<std::byte> return_row(uint64_t epoch, int64_t t, int64_t slot) const {
    return staging(epoch, messages_bytes() + (t * slots() + slot) * round_up(return_bytes, 128));
  }

 private:
  SWITCHYARD_FN SymPtr<uint64_t> word(uint64_t epoch, int64_t index) const {
    return {base + static_cast<uint64_t>((static_cast<int64_t>(epoch & 1) * set_words() + index) * 8)};
  }
  SWITCHYARD_FN SymPtr<std::byte> staging(uint64_t epoch, int64_t at) const {
    const int64_t set = static_cast<int64_t>(epoch & 1) * (messages_bytes() + returns_bytes());
    return {base + static_cast<uint64_t>(flags_bytes() + set + at)};
  }
};

/// Where the scales of a row lie in an output.
struct ScalePlace {
  bool column_major = false;
  int element_bytes = 4;  ///< 4: float32, 1: UE8M0
  int64_t groups = 0;     ///< per row
  int64_t row_bytes = 0;  ///< row-major: padded
  int64_t rows_per_expert = 0;

  SWITCHYARD_FN int64_t bytes_per_expert() const {
    return column_major ? words() * rows_per_expert * 4 : row_bytes * rows_per_expert;
  }
  /// int32 or float32 words of a row, column-major.
  SWITCHYARD_FN int64_t words() const { return (groups * element_bytes + 3) / 4; }
  /// Bytes of a row, padding included.
  SWITCHYARD_FN int64_t bytes_of_row() const { return column_major ? words() * 4 : row_bytes; }
  /// Byte `b` of the scales of row `row` (in the whole output).
  SWITCHYARD_FN int64_t at(int64_t row, int64_t b) const {
    if (!column_major) return row * row_bytes + b;
    const int64_t expert = row / rows_per_expert, r = row % rows_per_expert;
    return expert * bytes_per_expert() + ((b / 4) * rows_per_expert + r) * 4 + b % 4;
  }
};

}  // namespace switchyard::detail

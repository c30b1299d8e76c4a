// SPDX-License-Identifier: Apache-2.0
// Memory of a fused layer, defined once for host and device, and independent of how its products are implemented.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/control.hpp"

namespace switchyard::detail {

/// Memory that other ranks read and write, at the same heap offset on all ranks. The flags come first, because they survive a
/// sleep.
struct FusedLayout {
  uint64_t base = 0;  ///< heap offset
  int world = 1, experts = 0, topk = 0;
  int64_t tokens = 0;           ///< maximum of a rank
  int64_t rows = 0;             ///< maximum for a rank's experts
  int64_t row_bytes = 0;        ///< per output
  int64_t x_bytes = row_bytes;  ///< per token, as sent
  bool per_rank = false;        ///< a rank returns one row per token, the weighted sum of its outputs; else one row per route
  int64_t first_token = 0;      ///< position in x() of the call's token 0, equal on all ranks; not 0: a pass of a split call

  /// Maximum number of rows that are returned for a token.
  SWITCHYARD_FN int returned_rows() const { return per_rank && world < topk ? world : topk; }

  SWITCHYARD_FN ControlLayout control() const { return {base, world, experts}; }
  SWITCHYARD_FN int64_t announced_at() const { return control().bytes(); }
  SWITCHYARD_FN int64_t returned_at() const { return announced_at() + round_up(int64_t{world} * 8, 128); }
  SWITCHYARD_FN int64_t flags_bytes() const { return returned_at() + round_up(tokens * returned_rows() * 8, 128); }
  SWITCHYARD_FN int64_t source_at() const { return flags_bytes(); }
  SWITCHYARD_FN int64_t places_at() const { return source_at() + round_up(rows * 8, 128); }
  SWITCHYARD_FN int64_t place_weights_at() const { return places_at() + round_up(rows * topk * 4, 128); }
  SWITCHYARD_FN int64_t x_at() const { return place_weights_at() + (per_rank ? round_up(rows * topk * 4, 128) : 0); }
  SWITCHYARD_FN int64_t inbox_at() const { return x_at() + round_up(tokens * x_bytes, 128); }
  SWITCHYARD_FN int64_t bytes() const { return inbox_at() + round_up(tokens * returned_rows() * row_bytes, 128); }

  /// Set when rank `writer` has announced the destinations of its tokens, which are at x().
  SWITCHYARD_FN SymPtr<uint64_t> announced(int writer) const { return at<uint64_t>(announced_at()) + writer; }
  /// Set when row `i` of the reader's inbox is complete or, per_route, the output of route i if its expert is local. The row of
  /// token t is t * returned_rows() + j. Per route: j = k. Per rank: j is the number of lower ranks that return a row of t.
  SWITCHYARD_FN SymPtr<uint64_t> returned(int64_t i) const { return at<uint64_t>(returned_at()) + i; }
  /// The pack_source value of a row of the rank's experts, written by the row's source; its k is the j of returned(). per_rank:
  /// j is valid at the highest of a token's rows on the rank.
  SWITCHYARD_FN SymPtr<int64_t> source(int64_t row) const { return at<int64_t>(source_at()) + row; }
  /// [K] at the lowest of a token's rows on the rank: all these rows, k ascending, padded with -1. At its other rows, the first
  /// element is -1, except at the highest row: after_lowest().
  SWITCHYARD_FN SymPtr<int32_t> places(int64_t row) const { return at<int32_t>(places_at()) + row * topk; }
  /// per_rank: the weights of places(row).
  SWITCHYARD_FN SymPtr<float> place_weights(int64_t row) const { return at<float>(place_weights_at()) + row * topk; }
  SWITCHYARD_FN SymPtr<std::byte> x(int64_t token) const { return at<std::byte>(x_at() + (first_token + token) * x_bytes); }
  SWITCHYARD_FN SymPtr<std::byte> inbox(int64_t i) const { return at<std::byte>(inbox_at() + i * row_bytes); }

 private:
  template <class T>
  SWITCHYARD_FN SymPtr<T> at(int64_t offset) const {
    return {base + static_cast<uint64_t>(offset)};
  }
};

/// The first of places() at the highest of a token's rows on a rank, if it has another row, `lowest`; and its inverse.
SWITCHYARD_FN constexpr int32_t after_lowest(int32_t lowest) { return -2 - lowest; }

/// Parts of a layer executed by a call: dispatch and the up product, the down product and combine, or both.
struct FusedParts {
  bool up = true, down = true;
};

/// Counters private to this rank; 0 between calls.
struct FusedCounters {
  uint64_t stagings, announcements, announced, pulls, tickets, returns, sums, exits;  ///< the first two: for the GPU kernel
  uint64_t complete;  ///< GPU kernel, per_rank: a number of leading row tiles whose outputs are all stored
};

/// Memory private to this rank. Flags hold the call's word, i.e. an epoch, and are never reset.
struct FusedMemory {
  /// [rows, H] of its experts, at the beginning of each row of y. A down tile writes y after all up tiles that read its rows.
  std::byte* x_rows = nullptr;
  float* x_scales = nullptr;  ///< fp8: [H / 128, scale_pitch], one per 128 elements of a row; h_scales: [I / 128, scale_pitch]
  float* h_scales = nullptr;
  int64_t scale_pitch = 0;
  std::byte* h = nullptr;       ///< [rows, I]
  std::byte* y = nullptr;       ///< [rows, H]
  uint64_t* arrived = nullptr;  ///< [rows] of x_rows
  uint64_t* h_done = nullptr;   ///< [row tiles, column tiles of up]
  uint64_t* y_done = nullptr;   ///< [row tiles, column tiles of down]
  FusedCounters* counters = nullptr;
  int64_t flags = 0;  ///< bytes of the counters and flags, which come first
};

}  // namespace switchyard::detail

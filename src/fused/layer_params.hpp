// SPDX-License-Identifier: Apache-2.0
// What the kernel of a whole MoE layer is given: tables of one call's routing, places in every rank's memory, both products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/gpu/grouped_params.hpp"
#include "layout/addressing.hpp"
#include "layout/heap_view.hpp"

namespace switchyard::detail::fused {

/// Rows of the widest tile: what the rows that travel leave of a block's shared memory.
inline constexpr int kWidest = 176;
/// A row travels in pieces of at most so many bytes, each through one of these buffers.
inline constexpr uint32_t kPieceBytes = 7168, kPieces = 2;
/// Rows of a tile that are sent to their owners together.
inline constexpr int kRowsAtOnce = 16;
inline constexpr int kMostTopk = 32;

/// Byte offsets into every rank's segment; the same on all ranks. Rows are this kernel's from `told` of a call on until the rank
/// has ended the call.
struct LayerPlaces {
  uint64_t x = 0;           ///< rows [tokens] of the rank's own tokens, which others read
  uint64_t row_source = 0;  ///< int64 [rows] pack_source of each row of the rank's experts, written by its source
  uint64_t pull_rows = 0;   ///< int32 [rows, K]: where the source's row goes, this row first, then -1; first -1: another row's
  uint64_t told = 0;        ///< uint64 [W] epoch: a rank's x, row_source and pull_rows are there
  uint64_t inbox = 0;       ///< rows [tokens, K] that come back
  uint64_t returned = 0;    ///< uint64 [tokens, K] epoch: the row has come, or lies in `y` if it is an expert's here
};

/// Counters of this rank alone; 0 between calls.
struct LayerCounters {
  uint64_t told, pulls, moves, tokens, exits;
  uint32_t tickets[2];
};

struct LayerParams {
  gemm::GroupedParams up, down;  ///< `ranges` of `up` is that of both; rows of `down` are the outputs of `up`
  HeapView heap;
  LayerPlaces places;
  uint64_t epoch = 0, timeout_ns = 0;
  ExpertMap map;
  int topk = 0;
  int lag = 0;  ///< experts between a product of rows up and the one down
  int64_t tokens = 0, row_bytes = 0;
  int64_t rows = 0;  ///< of this rank's experts
  const int32_t* ids = nullptr;        ///< [T, K] expert, or negative
  const int32_t* route_row = nullptr;  ///< [T, K] row at the expert's rank, or -1
  const float* weights = nullptr;      ///< [T, K]
  const int32_t* order = nullptr;      ///< [T] in which tokens are summed, or null
  std::byte* x_rows = nullptr;         ///< [rows] of this rank's experts
  const std::byte* y = nullptr;        ///< [rows] outputs of `down`
  std::byte* out = nullptr;            ///< [T]
  uint64_t* arrived = nullptr;         ///< [rows] epoch
  uint64_t* h_done = nullptr;          ///< [row tiles, column tiles of up] epoch
  uint64_t* y_done = nullptr;          ///< [row tiles, column tiles of down] epoch
  LayerCounters* counters = nullptr;
  uint64_t* fault = nullptr;  ///< 0, or the site of the first wait that ended without what it waited for
};

}  // namespace switchyard::detail::fused

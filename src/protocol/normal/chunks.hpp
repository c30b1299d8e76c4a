// SPDX-License-Identifier: Apache-2.0
// Numbers of chunks in which rows are announced, and the tokens of each chunk. Chosen by measurement; both sides of a call must
// use the same values.
#pragma once

#include <cstdint>
#include <vector>

#include "base/macros.hpp"
#include "layout/control.hpp"
#include "plan/plan.hpp"

namespace switchyard::detail {

/// Number of chunks in which expert-major dispatch announces rows, so that receivers can meanwhile place repeated routes.
/// Successive chunks become shorter, because nothing overlaps the placement of the last one.
inline constexpr int kRowChunks = 6;
/// Number of chunks that a rank-major dispatch announces together. An announcement takes microseconds, during which a full link
/// is idle, and copies to the caller's memory are much faster than the arrival of rows.
inline constexpr int kCopiedTogether = 3;
static_assert(kRowChunks % kCopiedTogether == 0);
/// One past the last token of chunk c.
SWITCHYARD_FN constexpr int64_t row_chunk_end(int64_t tokens, int c) {
  constexpr int kShares = kRowChunks * (kRowChunks + 1) / 2;
  const int after = kRowChunks - 1 - c;
  return tokens * (kShares - after * (after + 1) / 2) / kShares;
}

/// Number of chunks of the owners' tokens in which a per_rank combine of expert-major rows announces its sums, so that owners
/// can meanwhile pull them. Successive chunks become longer, because nothing overlaps the computation of the first one.
inline constexpr int kSumChunks = 8;
/// One past the last token of chunk c.
SWITCHYARD_FN constexpr int64_t sum_chunk_end(int64_t tokens, int c) {
  return tokens * ((c + 1) * (c + 2) / 2) / (kSumChunks * (kSumChunks + 1) / 2);
}
/// One past the last token of chunk c for per_route, which pushes rows in ever shorter chunks, because nothing overlaps the
/// summation of the last one.
SWITCHYARD_FN constexpr int64_t route_chunk_end(int64_t tokens, int c) {
  return tokens - (c + 1 < kSumChunks ? sum_chunk_end(tokens, kSumChunks - 2 - c) : 0);
}
/// Number of parts into which a row of chunk c is divided among warps. This is more than one for the last chunks, which have
/// fewer rows than a GPU has warps.
SWITCHYARD_FN constexpr int route_chunk_parts(int c) { return c + 2 < kSumChunks ? 1 : 8; }

static_assert(kRowChunks <= ControlLayout::kMaxChunks && kSumChunks <= ControlLayout::kMaxChunks);

/// [kRowChunks * W] number of this rank's tokens' records at each rank, cumulative to the end of each chunk.
inline std::vector<int32_t> records_by_chunk(const HandleData& h) {
  const auto world = static_cast<size_t>(h.counts.world);
  std::vector<int32_t> out, count(world, 0);
  int64_t t = 0;
  for (int c = 0; c < kRowChunks; ++c) {
    for (; t < row_chunk_end(h.tokens, c); ++t) {
      const auto begin = h.sends.begin() + h.send_begin[static_cast<size_t>(t)];
      const auto end = h.sends.begin() + h.send_begin[static_cast<size_t>(t) + 1];
      for (auto send = begin; send != end; ++send) ++count[static_cast<size_t>(send->rank)];
    }
    out.insert(out.end(), count.begin(), count.end());
  }
  return out;
}

}  // namespace switchyard::detail

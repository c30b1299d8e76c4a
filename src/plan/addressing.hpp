// SPDX-License-Identifier: Apache-2.0
// Pure functions from counts to addresses; the same on host and device. Everything that a rank must know about another rank's
// rows follows from the gathered counts through these.
#pragma once

#include <cstdint>

#include "base/macros.hpp"

namespace switchyard::detail {

SWITCHYARD_FN constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Which rank owns which experts: consecutive ranges, the first `experts mod world` ranks hold one more.
struct ExpertMap {
  int experts = 0;
  int world = 1;

  SWITCHYARD_FN int first(int rank) const {
    const int base = experts / world, extra = experts % world;
    return rank * base + (rank < extra ? rank : extra);
  }
  SWITCHYARD_FN int count(int rank) const { return experts / world + (rank < experts % world ? 1 : 0); }
  SWITCHYARD_FN int owner(int expert) const {
    const int base = experts / world, extra = experts % world, split = extra * (base + 1);
    return expert < split ? expert / (base + 1) : extra + (expert - split) / base;
  }
  SWITCHYARD_FN int max_count() const { return experts / world + (experts % world ? 1 : 0); }
};

/// Expert-major dispatch tells its receivers in so many steps what has come, so that they can place repeated routes meanwhile.
/// Chunks become shorter, because nothing else goes on while the last one is placed.
inline constexpr int kRowChunks = 6;
/// One past the last token of chunk c.
SWITCHYARD_FN constexpr int64_t row_chunk_end(int64_t tokens, int c) {
  constexpr int kShares = kRowChunks * (kRowChunks + 1) / 2;
  const int after = kRowChunks - 1 - c;
  return tokens * (kShares - after * (after + 1) / 2) / kShares;
}

/// Expert-major combine per_rank announces its sums in so many chunks of their owners' tokens, so that owners can pull them
/// meanwhile. Chunks become longer, because nothing else goes on while the first one is made.
inline constexpr int kSumChunks = 8;
/// One past the last token of chunk c.
SWITCHYARD_FN constexpr int64_t sum_chunk_end(int64_t tokens, int c) {
  return tokens * ((c + 1) * (c + 2) / 2) / (kSumChunks * (kSumChunks + 1) / 2);
}
/// The same for per_route, which pushes rows in chunks that become shorter: nothing goes on beside summing the last one.
SWITCHYARD_FN constexpr int64_t route_chunk_end(int64_t tokens, int c) {
  return tokens - (c + 1 < kSumChunks ? sum_chunk_end(tokens, kSumChunks - 2 - c) : 0);
}
/// A row of chunk c is dealt in so many parts: the last chunks have fewer rows than a GPU has warps.
SWITCHYARD_FN constexpr int route_chunk_parts(int c) { return c + 2 < kSumChunks ? 1 : 8; }

/// Where an expert-major row came from.
SWITCHYARD_FN constexpr int64_t pack_source(int rank, int k, int64_t token) {
  return (static_cast<int64_t>(rank) << 48) | (static_cast<int64_t>(k) << 32) | token;
}

/// Token range of channel c: consecutive ranges of ceil(tokens / channels).
SWITCHYARD_FN constexpr int64_t channel_begin(int64_t tokens, int channels, int c) {
  const int64_t per = (tokens + channels - 1) / channels;
  const int64_t begin = per * c;
  return begin < tokens ? begin : tokens;
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Pure functions that map counts to addresses, identical on host and device. Every rank uses them to derive the positions of
// other ranks' rows from the gathered counts.
#pragma once

#include <cstdint>

#include "base/macros.hpp"

namespace switchyard::detail {

SWITCHYARD_FN constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Assignment of experts to ranks in consecutive ranges; the first `experts mod world` ranks hold one more expert.
struct ExpertRanges {
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

/// The packed source of an expert-major row.
SWITCHYARD_FN constexpr int64_t pack_source(int rank, int k, int64_t token) {
  return (static_cast<int64_t>(rank) << 48) | (static_cast<int64_t>(k) << 32) | token;
}
SWITCHYARD_FN constexpr int source_rank(int64_t source) { return static_cast<int>(source >> 48); }
SWITCHYARD_FN constexpr int source_k(int64_t source) { return static_cast<int>(source >> 32 & 0xffff); }
SWITCHYARD_FN constexpr int64_t source_token(int64_t source) { return source & 0xffffffff; }

/// First token of channel c; channels are consecutive ranges of ceil(tokens / channels) tokens.
SWITCHYARD_FN constexpr int64_t channel_begin(int64_t tokens, int channels, int c) {
  const int64_t per = (tokens + channels - 1) / channels;
  const int64_t begin = per * c;
  return begin < tokens ? begin : tokens;
}

}  // namespace switchyard::detail

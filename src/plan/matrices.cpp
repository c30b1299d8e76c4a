// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <string>

#include "plan/index.hpp"
#include "plan/views.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

/// Number of tokens from `source` whose row is kept by rank `dest`. Rows are ordered by source, so a capacity drops those of
/// the last sources.
int64_t kept_tokens(const HandleData& h, int source, int dest) {
  const int64_t sent = h.counts.d(source, dest);
  if (h.layout == Layout::expert_major) return sent;
  const int64_t capacity_left = h.counts.capacity[idx(dest)] - h.counts.touching_before(source, dest);
  return std::clamp<int64_t>(capacity_left, 0, sent);
}

void fill_rank_prefix(const HandleData& h, DispatchMatrices& m) {
  const int world = m.world;
  m.rank_prefix_matrix.resize(idx(int64_t{world} * world));
  for (int dest = 0; dest < world; ++dest) {
    int64_t sum = 0;
    for (int source = 0; source < world; ++source) {
      sum += kept_tokens(h, source, dest);
      m.rank_prefix_matrix[idx(int64_t{source} * world + dest)] = narrow(sum, "rank_prefix_matrix");
    }
  }
}

/// This rank's tokens: their destinations, and their positions in the streams (channel, rank).
void fill_sender(const HandleData& h, DispatchMatrices& m) {
  const int world = m.world, channels = m.num_channels;
  m.is_token_in_rank.assign(idx(h.tokens * world), 0);
  m.send_head.assign(idx(h.tokens * world), -1);
  m.channel_prefix_matrix.assign(idx(int64_t{world} * channels), 0);
  std::vector<int32_t> in_stream(idx(world));
  for (int c = 0; c < channels; ++c) {
    std::fill(in_stream.begin(), in_stream.end(), 0);
    const int64_t end = channel_begin(h.tokens, channels, c + 1);
    for (int64_t t = channel_begin(h.tokens, channels, c); t < end; ++t) {
      for (int64_t i = h.send_begin[idx(t)]; i < h.send_begin[idx(t + 1)]; ++i) {
        const SendEntry& send = h.sends[idx(i)];
        if (send.row < 0) continue;
        m.is_token_in_rank[idx(t * world + send.rank)] = 1;
        m.send_head[idx(t * world + send.rank)] = in_stream[idx(send.rank)]++;
      }
    }
    for (int dest = 0; dest < world; ++dest) {
      const int32_t before = c ? m.channel_prefix_matrix[idx(int64_t{dest} * channels + c - 1)] : 0;
      m.channel_prefix_matrix[idx(int64_t{dest} * channels + c)] = before + in_stream[idx(dest)];
    }
  }
}

/// Rows received here: their tokens, and the start of each (source, channel) among the rows from its source.
void fill_receiver(const HandleData& h, DispatchMatrices& m) {
  const int world = m.world, channels = m.num_channels;
  m.recv_channel_prefix_matrix.resize(idx(int64_t{world} * channels));
  m.recv_src_idx.clear();
  for (int source = 0; source < world; ++source) {
    const auto begin = h.record_token.begin() + h.counts.touching_before(source, h.rank);
    const auto end = begin + kept_tokens(h, source, h.rank);
    m.recv_src_idx.insert(m.recv_src_idx.end(), begin, end);
    for (int c = 0; c < channels; ++c) {
      const int64_t first_token = channel_begin(h.counts.tokens[idx(source)], channels, c);
      const auto first = std::lower_bound(begin, end, first_token);  // tokens of one source ascend
      m.recv_channel_prefix_matrix[idx(int64_t{source} * channels + c)] = static_cast<int32_t>(first - begin);
    }
  }
}

}  // namespace

bool dropped_at_capacity(const HandleData& h) {
  const GatheredCounts& c = h.counts;
  std::vector<int64_t> first_row;
  for (int dest = 0; dest < c.world; ++dest) {
    const int64_t capacity = c.capacity[idx(dest)];
    if (h.layout == Layout::rank_major) {
      if (c.touching_before(c.world, dest) > capacity) return true;
      continue;
    }
    c.expert_first_rows(h.alignment, dest, first_row);
    for (int el = 0; el < h.map.count(dest); ++el) {
      int64_t end = first_row[idx(el)];
      for (int source = 0; source < c.world; ++source) end += c.s(source, h.map.first(dest) + el);
      if (end > capacity && end > first_row[idx(el)]) return true;  // an expert without rows, or cut padding, loses nothing
    }
  }
  return false;
}

DispatchMatrices make_matrices(const HandleData& h, int num_channels) {
  constexpr int kMaxChannels = 1 << 20;
  if (num_channels < 1 || num_channels > kMaxChannels) {
    throw Error(ErrorCode::invalid_argument,
                "num_channels is " + std::to_string(num_channels) + "; allowed: 1 to " + std::to_string(kMaxChannels));
  }
  if (h.layout == Layout::expert_major && dropped_at_capacity(h)) {
    throw Error(ErrorCode::unsupported, "matrices of an expert-major dispatch that dropped routes at capacity");
  }
  DispatchMatrices m;
  m.world = h.counts.world;
  m.num_channels = num_channels;
  fill_rank_prefix(h, m);
  fill_sender(h, m);
  fill_receiver(h, m);
  return m;
}

}  // namespace switchyard::detail

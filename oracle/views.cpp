// SPDX-License-Identifier: Apache-2.0
#include "oracle/views.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace oracle {

namespace {

template <class V>
auto& element(V& v, int64_t i) {
  return v[static_cast<size_t>(i)];
}

/// 1 for tokens that are sent to a given rank.
using Selection = std::vector<uint8_t>;

/// Channel of a token. Channels are consecutive ranges of ceil(T / C) tokens.
int64_t channel_of(int64_t token, int64_t tokens, int channels) {
  const int64_t per_channel = tokens / channels + (tokens % channels != 0 ? 1 : 0);
  return token / per_channel;
}

/// Number of selected tokens in each channel.
std::vector<int32_t> per_channel(const Selection& selected, int channels) {
  const auto tokens = static_cast<int64_t>(selected.size());
  std::vector<int32_t> count(static_cast<size_t>(channels), 0);
  for (int64_t t = 0; t < tokens; ++t) element(count, channel_of(t, tokens, channels)) += element(selected, t);
  return count;
}

/// For each selected token, the number of selected tokens before it in its channel; -1 for other tokens.
std::vector<int32_t> heads(const Selection& selected, int channels) {
  const auto tokens = static_cast<int64_t>(selected.size());
  std::vector<int32_t> next(static_cast<size_t>(channels), 0), head;
  for (int64_t t = 0; t < tokens; ++t)
    head.push_back(element(selected, t) ? element(next, channel_of(t, tokens, channels))++ : -1);
  return head;
}

}  // namespace

Matrices matrices(const Problem& p, const Expected& x, int rank, int num_channels) {
  std::vector<std::vector<Selection>> selected(static_cast<size_t>(p.world));  // [source][dest]
  for (int s = 0; s < p.world; ++s)
    element(selected, s).assign(static_cast<size_t>(p.world), Selection(static_cast<size_t>(p.tokens(s)), 0));
  for (const auto& r : x.routes) {
    if (r.kept) element(element(element(selected, r.source), r.dest), r.token) = 1;
  }
  Matrices m;
  std::vector<int32_t> sent(static_cast<size_t>(p.world), 0);  // to each rank, so far
  for (int s = 0; s < p.world; ++s) {
    for (int d = 0; d < p.world; ++d) {
      const Selection& tokens = element(element(selected, s), d);
      m.rank_prefix.push_back(element(sent, d) += static_cast<int32_t>(std::count(tokens.begin(), tokens.end(), 1)));
    }
  }
  std::vector<std::vector<int32_t>> head;  // [dest][token]
  for (int d = 0; d < p.world; ++d) {
    const Selection& tokens = element(element(selected, rank), d);
    int32_t sum = 0;
    for (const int32_t n : per_channel(tokens, num_channels)) m.channel_prefix.push_back(sum += n);
    head.push_back(heads(tokens, num_channels));
  }
  for (int s = 0; s < p.world; ++s) {
    const Selection& tokens = element(element(selected, s), rank);
    for (int64_t t = 0; t < p.tokens(s); ++t)
      if (element(tokens, t)) m.recv_src_idx.push_back(static_cast<int32_t>(t));
    int32_t sum = 0;
    for (const int32_t n : per_channel(tokens, num_channels)) {
      m.recv_channel_prefix.push_back(sum);
      sum += n;
    }
  }
  for (int64_t t = 0; t < p.tokens(rank); ++t) {
    for (int d = 0; d < p.world; ++d) {
      m.is_token_in_rank.push_back(element(element(element(selected, rank), d), t));
      m.send_head.push_back(element(element(head, d), t));
    }
  }
  return m;
}

RoutingCounts routing_counts(const Problem& p, int rank) {
  RoutingCounts c;
  c.tokens_per_rank.assign(static_cast<size_t>(p.world), 0);
  c.tokens_per_expert.assign(static_cast<size_t>(p.experts), 0);
  for (int64_t t = 0; t < p.tokens(rank); ++t) {
    Selection selected(static_cast<size_t>(p.world), 0);
    for (int k = 0; k < p.topk; ++k) {
      const int64_t id = p.id(rank, t, k);
      if (!p.valid(id)) continue;
      ++element(c.tokens_per_expert, id);
      element(selected, p.owner(id)) = 1;
    }
    for (int d = 0; d < p.world; ++d) {
      c.is_token_in_rank.push_back(element(selected, d));
      element(c.tokens_per_rank, d) += element(selected, d);
    }
  }
  return c;
}

Ledger ledger(const Problem& p, int rank) {
  Ledger l;
  l.padded = (p.experts + 15) / 16 * 16;
  for (const auto& ids : p.ids) {
    std::vector<int32_t> count(static_cast<size_t>(l.padded), 0);
    for (const int64_t id : ids)
      if (p.valid(id)) ++element(count, id);
    l.peer_token_per_expert.insert(l.peer_token_per_expert.end(), count.begin(), count.end());
    std::partial_sum(count.begin(), count.end(), std::back_inserter(l.cumsum_per_expert));
  }
  // The rank's routes, stably sorted by expert.
  std::vector<int32_t> next(1, 0);
  next.insert(next.end(), l.cumsum_per_expert.begin() + int64_t{rank} * l.padded,
              l.cumsum_per_expert.begin() + (int64_t{rank} + 1) * l.padded);
  for (const int64_t id : element(p.ids, rank)) l.expanded_row_idx.push_back(p.valid(id) ? element(next, id)++ : -1);

  const int first = p.first_expert(rank), last = p.first_expert(rank + 1);
  const int alignment = p.layout == Layout::expert_major ? p.alignment : 1;
  const bool bounded = p.layout == Layout::expert_major && p.size == SizePolicy::capacity;
  l.prev_sum_before_rank.resize(static_cast<size_t>(p.world) * static_cast<size_t>(last - first));
  int32_t offset = 0;
  for (int e = first; e < last; ++e) {
    l.dispatch_offset.push_back(bounded ? static_cast<int32_t>(std::min<int64_t>(offset, element(p.capacity, rank))) : offset);
    int32_t before = 0;
    for (int s = 0; s < p.world; ++s) {
      element(l.prev_sum_before_rank, int64_t{s} * (last - first) + e - first) = before;
      before += element(l.peer_token_per_expert, int64_t{s} * l.padded + e);
    }
    offset += (before + alignment - 1) / alignment * alignment;
  }
  return l;
}

}  // namespace oracle

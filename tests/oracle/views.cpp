// SPDX-License-Identifier: Apache-2.0
#include "oracle/views.hpp"

#include <algorithm>
#include <set>
#include <utility>

namespace oracle {

namespace {

template <class V>
auto& at(V& v, int64_t i) {
  return v[static_cast<size_t>(i)];
}

bool valid(const Problem& p, int64_t id) { return id >= 0 && id < p.experts; }

int64_t id_of(const Problem& p, int rank, int64_t token, int k) { return at(at(p.ids, rank), token * p.topk + k); }

/// Channel of a token: consecutive ranges of ceil(T / C) tokens.
int channel_of(int64_t token, int64_t tokens, int channels) {
  const int64_t per_channel = tokens / channels + (tokens % channels != 0 ? 1 : 0);
  return static_cast<int>(token / per_channel);
}

}  // namespace

Matrices matrices(const Problem& p, const Expected& x, int rank, int num_channels) {
  // sent[s][d]: tokens of s that send a row to d.
  std::vector<std::vector<std::set<int64_t>>> sent(static_cast<size_t>(p.world),
                                                   std::vector<std::set<int64_t>>(static_cast<size_t>(p.world)));
  for (const auto& r : x.routes) {
    if (r.kept) at(at(sent, r.source), r.dest).insert(r.token);
  }
  Matrices m;
  for (int i = 0; i < p.world; ++i) {
    for (int j = 0; j < p.world; ++j) {
      size_t sum = 0;
      for (int s = 0; s <= i; ++s) sum += at(at(sent, s), j).size();
      m.rank_prefix.push_back(static_cast<int32_t>(sum));
    }
  }
  const int64_t tokens = p.tokens(rank);
  for (int d = 0; d < p.world; ++d) {
    for (int c = 0; c < num_channels; ++c) {
      m.channel_prefix.push_back(
          static_cast<int32_t>(std::count_if(at(at(sent, rank), d).begin(), at(at(sent, rank), d).end(),
                                             [&](int64_t t) { return channel_of(t, tokens, num_channels) <= c; })));
    }
  }
  for (int s = 0; s < p.world; ++s) {
    const auto& rows = at(at(sent, s), rank);
    for (const int64_t t : rows) m.recv_src_idx.push_back(static_cast<int32_t>(t));
    for (int c = 0; c < num_channels; ++c) {
      m.recv_channel_prefix.push_back(static_cast<int32_t>(
          std::count_if(rows.begin(), rows.end(), [&](int64_t t) { return channel_of(t, p.tokens(s), num_channels) < c; })));
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int d = 0; d < p.world; ++d) {
      const auto& rows = at(at(sent, rank), d);
      const bool goes = rows.count(t) != 0;
      m.is_token_in_rank.push_back(goes);
      m.send_head.push_back(!goes ? -1 : static_cast<int32_t>(std::count_if(rows.begin(), rows.end(), [&](int64_t other) {
        return other < t && channel_of(other, tokens, num_channels) == channel_of(t, tokens, num_channels);
      })));
    }
  }
  return m;
}

RoutingCounts routing_counts(const Problem& p, int rank) {
  RoutingCounts c;
  c.tokens_per_rank.assign(static_cast<size_t>(p.world), 0);
  c.tokens_per_expert.assign(static_cast<size_t>(p.experts), 0);
  for (int64_t t = 0; t < p.tokens(rank); ++t) {
    std::set<int> ranks;
    for (int k = 0; k < p.topk; ++k) {
      const int64_t id = id_of(p, rank, t, k);
      if (!valid(p, id)) continue;
      at(c.tokens_per_expert, id)++;
      ranks.insert(p.owner(id));
    }
    for (int d = 0; d < p.world; ++d) {
      c.is_token_in_rank.push_back(ranks.count(d) != 0);
      at(c.tokens_per_rank, d) += ranks.count(d) != 0;
    }
  }
  return c;
}

Ledger ledger(const Problem& p, int rank) {
  Ledger l;
  for (l.padded = 0; l.padded < p.experts;) l.padded += 16;
  for (int s = 0; s < p.world; ++s) {
    int32_t sum = 0;
    for (int e = 0; e < l.padded; ++e) {
      const auto n = static_cast<int32_t>(e < p.experts ? std::count(at(p.ids, s).begin(), at(p.ids, s).end(), e) : 0);
      l.peer_token_per_expert.push_back(n);
      l.cumsum_per_expert.push_back(sum += n);
    }
  }
  // The rank's routes in a stable sort by expert.
  std::vector<std::pair<int64_t, int64_t>> order;
  l.expanded_row_idx.assign(at(p.ids, rank).size(), -1);
  for (int64_t f = 0; f < p.tokens(rank) * p.topk; ++f) {
    if (valid(p, at(at(p.ids, rank), f))) order.emplace_back(at(at(p.ids, rank), f), f);
  }
  std::sort(order.begin(), order.end());
  for (size_t row = 0; row < order.size(); ++row) at(l.expanded_row_idx, order[row].second) = static_cast<int32_t>(row);

  const int first = p.first_expert(rank), last = p.first_expert(rank + 1);
  const int alignment = p.layout == Layout::expert_major ? p.alignment : 1;
  const bool bounded = p.layout == Layout::expert_major && p.size == SizePolicy::capacity;
  int32_t next = 0;
  for (int e = first; e < last; ++e) {
    l.dispatch_offset.push_back(bounded ? static_cast<int32_t>(std::min<int64_t>(next, at(p.capacity, rank))) : next);
    for (int s = 0; s < p.world; ++s) next += at(l.peer_token_per_expert, int64_t{s} * l.padded + e);
    while (next % alignment != 0) ++next;
  }
  for (int s = 0; s < p.world; ++s) {
    for (int e = first; e < last; ++e) {
      int32_t before = 0;
      for (int other = 0; other < s; ++other) before += at(l.peer_token_per_expert, int64_t{other} * l.padded + e);
      l.prev_sum_before_rank.push_back(before);
    }
  }
  return l;
}

}  // namespace oracle

// SPDX-License-Identifier: Apache-2.0
// Row counts between ranks and between hosts, for groups of any size, obtained from the routes of all ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "run/routing_source.hpp"
#include "switchyard/routing.hpp"

namespace switchyard::tool {

/// Assignment of ranks to hosts: the ranks of host 0 come first, then those of host 1, and so on. The ranks of a host have
/// rails, numbered from 0 in ascending order. On every other host, a rank has a proxy: the rank with the same rail modulo that
/// host's number of ranks (docs/design/0055-several-hosts.md).
class HostsOfRanks {
 public:
  explicit HostsOfRanks(const std::vector<int>& ranks_of_hosts);
  int world() const { return first_.back(); }
  int hosts() const { return static_cast<int>(first_.size()) - 1; }
  int first(int host) const { return first_[static_cast<size_t>(host)]; }
  int size(int host) const { return first(host + 1) - first(host); }
  int host_of(int rank) const { return host_of_[static_cast<size_t>(rank)]; }
  int rail(int rank) const { return rank - first(host_of(rank)); }
  int proxy(int rank, int host) const { return first(host) + rail(rank) % size(host); }
  bool together(int a, int b) const { return host_of(a) == host_of(b); }
  int max_host_size() const;

 private:
  std::vector<int> first_;    ///< [hosts + 1]
  std::vector<int> host_of_;  ///< [world]
};

/// Row counts of one call. A token's repeated experts count as one (token, rank) pair and several routes.
class Traffic {
 public:
  Traffic(HostsOfRanks where, int num_experts);
  /// Adds the tokens of rank `source`. \pre ids are below num_experts; negative ids are dropped routes
  void add(int source, const Routing& routing);
  /// Scales all counts from `counted` tokens per rank to `tokens`.
  void scale(int64_t counted, int64_t tokens);

  const HostsOfRanks& where() const { return where_; }
  /// Number of tokens of `source` with a row for rank `dest`.
  double pairs(int source, int dest) const { return scale_ * pairs_[at(source, dest)]; }
  /// Number of routes from `source` to experts of `dest`.
  double routes(int source, int dest) const { return scale_ * routes_[at(source, dest)]; }
  /// Number of tokens of `source` with a row for any rank of `host`.
  double tokens_to(int source, int host) const {
    return scale_ * touching_[static_cast<size_t>(source) * static_cast<size_t>(where_.hosts()) + static_cast<size_t>(host)];
  }
  /// Number of tokens of `source` with a row for any rank.
  double tokens(int source) const { return scale_ * tokens_[static_cast<size_t>(source)]; }
  /// Maximum number of tokens on a rank, including tokens without a route.
  double max_tokens() const { return scale_ * static_cast<double>(max_tokens_); }

 private:
  size_t at(int source, int dest) const {
    return static_cast<size_t>(source) * static_cast<size_t>(where_.world()) + static_cast<size_t>(dest);
  }
  HostsOfRanks where_;
  std::vector<int> owner_;                          ///< [experts]
  std::vector<int32_t> pairs_, routes_, touching_;  ///< [W, W], [W, W], [W, H]
  std::vector<int32_t> tokens_;                     ///< [W]
  std::vector<int64_t> rank_seen_, host_seen_;      ///< number of the last token seen
  int64_t seen_ = 0, max_tokens_ = 0;
  double scale_ = 1;
};

/// Maximum number of tokens counted over all ranks; if there are more, only the first tokens of each rank are counted, as
/// representatives.
inline constexpr int64_t kMaxCountedTokens = int64_t{1} << 24;

/// Number of tokens per rank that are counted in groups of at most `max_world` ranks.
int64_t counted_tokens(int64_t tokens, int max_world);

/// The traffic of groups with more than kMaxRanks ranks and `tokens` tokens per rank. They reuse the routing for kMaxRanks
/// ranks, each time with further tokens.
std::vector<Traffic> count_large_traffic(const std::vector<HostsOfRanks>& groups, int64_t tokens, const RoutingSource& source);

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// Maps ranks to hosts, and ranks to their proxies on other hosts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/rank_list.hpp"

namespace switchyard::detail {

/// A host is the set of ranks that map each other's memory; hosts are numbered by their lowest ranks. Equal on all ranks.
class HostMap {
 public:
  /// All ranks on one host.
  explicit HostMap(int world) : HostMap(std::vector<std::string>(static_cast<size_t>(world))) {}
  /// Ranks with equal strings share a host.
  explicit HostMap(std::span<const std::string> places) {
    std::vector<size_t> first;  // per host: its lowest rank
    for (size_t r = 0; r < places.size(); ++r) {
      size_t host = 0;
      while (host < first.size() && places[first[host]] != places[r]) ++host;
      if (host == first.size()) {
        first.push_back(r);
        ranks_.emplace_back();
      }
      host_of_.push_back(static_cast<int>(host));
      rail_.push_back(static_cast<int>(ranks_[host].size()));
      ranks_[host].push_back(static_cast<int>(r));
    }
  }

  int world() const noexcept { return static_cast<int>(host_of_.size()); }
  int hosts() const noexcept { return static_cast<int>(ranks_.size()); }
  bool one_host() const noexcept { return ranks_.size() == 1; }
  int host_of(int rank) const noexcept { return host_of_[static_cast<size_t>(rank)]; }
  /// Ascending.
  const std::vector<int>& ranks_of(int host) const noexcept { return ranks_[static_cast<size_t>(host)]; }
  bool together(int a, int b) const noexcept { return host_of(a) == host_of(b); }
  /// Index of `rank` among the ranks on its host.
  int rail(int rank) const noexcept { return rail_[static_cast<size_t>(rank)]; }
  /// Proxy of `rank` on `host`; on its own host, the rank itself.
  int proxy(int rank, int host) const noexcept {
    const std::vector<int>& there = ranks_of(host);
    return there[static_cast<size_t>(rail(rank)) % there.size()];
  }
  /// True if these ranks on different hosts exchange rows, i.e. one of them is the other's proxy.
  bool exchange_rows(int a, int b) const noexcept {
    return !together(a, b) && (proxy(a, host_of(b)) == b || proxy(b, host_of(a)) == a);
  }
  /// Ranks on other hosts that exchange rows with `rank`, ascending.
  std::vector<int> rail_peers(int rank) const {
    std::vector<int> peers;
    for (int r = 0; r < world(); ++r)
      if (exchange_rows(rank, r)) peers.push_back(r);
    return peers;
  }
  /// Number of rails: the maximum number of ranks on a host. Each rail has one rank on each host, the proxy for one rail index,
  /// so ranks on hosts with fewer ranks belong to several rails.
  int rails() const noexcept {
    size_t max = 0;
    for (const std::vector<int>& ranks : ranks_) max = std::max(max, ranks.size());
    return static_cast<int>(max);
  }
  /// [hosts]
  std::vector<int> rail_ranks(int rail) const {
    std::vector<int> on;
    for (const std::vector<int>& ranks : ranks_) on.push_back(ranks[static_cast<size_t>(rail) % ranks.size()]);
    return on;
  }
  /// Rail that carries rows between ranks a and b; -1 if they do not exchange rows.
  int rail_between(int a, int b) const noexcept { return exchange_rows(a, b) ? std::max(rail(a), rail(b)) : -1; }
  /// "host 0: ranks 0-3; host 1: ranks 4-7".
  std::string text() const {
    std::string all;
    for (int h = 0; h < hosts(); ++h)
      all.append(h > 0 ? "; host " : "host ").append(std::to_string(h)).append(": ").append(describe_ranks(ranks_of(h)));
    return all;
  }

 private:
  std::vector<int> host_of_, rail_;      // [world]
  std::vector<std::vector<int>> ranks_;  // [hosts]
};

/// Returns the user-specified host of rank `rank`: `text`, or one entry of a comma-separated list that is repeated cyclically
/// over the ranks. "" if unspecified.
inline std::string place_of_rank(const std::string& text, int rank) {
  std::vector<std::string> places;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    places.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return places[static_cast<size_t>(rank) % places.size()];
}

}  // namespace switchyard::detail

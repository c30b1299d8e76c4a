// SPDX-License-Identifier: Apache-2.0
#include "base/index.hpp"
#include "exchange/low_latency/hosts/remote_plan.hpp"

#include <algorithm>

namespace switchyard::detail {

namespace {

/// The ranks of other hosts for which `rank` is the proxy, in ascending order.
std::vector<int> proxied_ranks(const HostMap& map, int rank) {
  std::vector<int> ranks;
  for (int r = 0; r < map.world(); ++r)
    if (!map.together(r, rank) && map.proxy(r, map.host_of(rank)) == rank) ranks.push_back(r);
  return ranks;
}

}  // namespace

RemotePlan::RemotePlan(const HostMap& map, int rank)
    : own_host(map.host_of(rank)),
      own_ranks(static_cast<int>(map.ranks_of(own_host).size())),
      rail_of_host(idx(map.hosts()), -1),
      proxy(idx(map.world()), -1),
      number(idx(map.world()), -1),
      sources(proxied_ranks(map, rank)) {
  for (int r = 0; r < map.world(); ++r) {
    host_of.push_back(map.host_of(r));
    const std::vector<int> others = proxied_ranks(map, r);
    max_sources = std::max(max_sources, static_cast<int>(others.size()));
    for (size_t n = 0; map.together(r, rank) && n < others.size(); ++n) {
      proxy[idx(others[n])] = r;
      number[idx(others[n])] = static_cast<int>(n);
    }
  }
  for (const int r : map.rail_peers(rank)) {
    RemoteRail rail;
    rail.rank = r;
    rail.host = map.host_of(r);
    rail.host_ranks = static_cast<int>(map.ranks_of(rail.host).size());
    rail.peer_is_my_proxy = map.proxy(rank, rail.host) == r ? 1 : 0;
    if (rail.peer_is_my_proxy != 0) rail_of_host[idx(rail.host)] = static_cast<int>(rails.size());
    rail.is_proxy_of_peer = proxy[idx(r)] == rank ? 1 : 0;
    if (rail.is_proxy_of_peer != 0) rail.source = number[idx(r)];
    rails.push_back(rail);
  }
}

int64_t rail_bytes(const LowLatencyLayout& l) {
  const CombineRound rows(CombineOrder::per_route, l.topk, l.return_bytes, 1);
  return round_up(std::max(DispatchRound(l).bytes, rows.bytes(l.max_tokens)), 256);
}

std::vector<PeerTransfer> dispatch_transfers(const RemotePlan& plan, const RemoteRails& remote,
                                             const LowLatencyLayout& layout) {
  const size_t bytes = idx(DispatchRound(layout).bytes);
  std::vector<PeerTransfer> transfers;
  for (size_t i = 0; i < plan.rails.size(); ++i) {
    const RemoteRail& rail = plan.rails[i];
    transfers.push_back({rail.rank,
                         {remote.sent, rail.peer_is_my_proxy != 0 ? bytes : 0},
                         {remote.in(static_cast<int>(i)), rail.is_proxy_of_peer != 0 ? bytes : 0}});
  }
  return transfers;
}

std::vector<PeerTransfer> combine_transfers(const RemotePlan& plan, const PhasedCombineParams& p) {
  const RemoteRails& remote = p.rails;
  // Without the first rows of tokens, the sizes are those of the maximum number of tokens.
  const auto end = [&](const CombineRound& round, bool rows, const auto& tokens) {
    if (!rows) return kRailHeadBytes;
    return round.bytes(round.first != nullptr ? static_cast<int>(tokens()) : p.layout.max_tokens);
  };
  std::vector<PeerTransfer> transfers;
  for (size_t i = 0; i < plan.rails.size(); ++i) {
    const RemoteRail& rail = plan.rails[i];
    const bool is_my_proxy = rail.peer_is_my_proxy != 0, is_proxy_of_peer = rail.is_proxy_of_peer != 0;
    const int64_t out = is_my_proxy ? 0 : kRailHeadBytes,
                  in = is_proxy_of_peer ? 0 : kRailHeadBytes;  // a head is sent to this rank's proxy
    const auto at = static_cast<int>(i);
    const auto theirs = [&] { return p.source_tokens[rail.rank]; };
    const auto ours = [&] { return int64_t{p.own->tokens}; };
    transfers.push_back({rail.rank,
                         {remote.out(at) + out, idx(end(p.sent(at), is_proxy_of_peer, theirs) - out)},
                         {remote.in(at) + in, idx(end(p.received(at), is_my_proxy, ours) - in)}});
  }
  return transfers;
}

}  // namespace switchyard::detail

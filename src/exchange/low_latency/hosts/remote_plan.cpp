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

namespace {

/// The part of a combine message that crosses in round k: in round 0 the head, if the message has a head; and this round's
/// rows, those of the tokens in `range`, if it has rows.
template <class Byte>
std::span<Byte> part_of(Byte* message, const CombineRound& round, TokenRange range, int64_t k, bool head, bool rows) {
  const int64_t begin = k > 0 ? round.bytes(range.begin) : head ? 0 : kRailHeadBytes;
  const int64_t end = rows ? round.bytes(range.end) : k > 0 ? begin : kRailHeadBytes;
  return {message + begin, idx(end - begin)};
}

}  // namespace

std::vector<PeerTransfer> combine_transfers(const RemotePlan& plan, const PhasedCombineParams& p, int64_t k) {
  // If `placed` is null, sizes are those for the maximum number of tokens.
  const int64_t max_tokens = p.layout.max_tokens;
  std::vector<PeerTransfer> transfers;
  for (size_t i = 0; i < plan.rails.size(); ++i) {
    const RemoteRail& rail = plan.rails[i];
    const auto at = static_cast<int>(i);
    const bool is_my_proxy = rail.peer_is_my_proxy != 0, is_proxy_of_peer = rail.is_proxy_of_peer != 0;
    const int64_t theirs = p.placed != nullptr ? p.source_tokens[rail.rank] : max_tokens;
    const int64_t ours = p.placed != nullptr ? p.own->tokens : max_tokens;
    const auto round = [&](bool received) {
      const int ranks = received ? rail.host_ranks : plan.own_ranks;
      return CombineRound(p.order, p.layout.topk, p.row_bytes, ranks, p.placed_of(at, received));
    };
    const CombineRound sent = round(false), received = round(true);
    const TokenRange out = tokens_of_round(k, sent.tokens_per_round(p.round_bytes), theirs);
    const TokenRange in = tokens_of_round(k, received.tokens_per_round(p.round_bytes), ours);
    transfers.push_back({rail.rank, part_of<const std::byte>(p.rails.out(at), sent, out, k, is_my_proxy, is_proxy_of_peer),
                         part_of(p.rails.in(at), received, in, k, is_proxy_of_peer, is_my_proxy)});
  }
  return transfers;
}

}  // namespace switchyard::detail

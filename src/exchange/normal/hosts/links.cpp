// SPDX-License-Identifier: Apache-2.0
#include "base/index.hpp"
#include "exchange/normal/hosts/links.hpp"

#include <algorithm>

#include "arch/cpu/cpu_arch.hpp"
#include "exchange/normal/hosts/sizes.hpp"

namespace switchyard::detail {

HostLinks::HostLinks(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes)
    : HostRails(map, rank, std::move(carrier), round_bytes),
      cuts_out_(peers_.size()),
      cuts_in_(peers_.size()),
      arrivals_(peers_.size()),
      of_host_(idx(map.hosts())) {
  moving_.rails.resize(peers_.size());
  summing_.rails.resize(peers_.size());
}

int HostLinks::places_on(int host, int topk) const { return std::min(topk, static_cast<int>(map_.ranks_of(host).size())); }

// ---- dispatch ----

void HostLinks::list_leaving(const LocalPlan& local, HandleData& h) const {
  if (!h.hosts || h.hosts.use_count() > 1) h.hosts = std::make_shared<HostTables>();
  HostTables& tables = *h.hosts;
  tables.host_of = host_of_;
  detail::list_leaving(local, host_of_, own_host_, map_.hosts(), tables.leaving);
  tables.returned.resize(idx(map_.hosts()));
  size_t n = 0;
  tables.crossed.resize(
      idx(std::count_if(peers_.begin(), peers_.end(), [](const RailPeer& peer) { return peer.is_proxy_of_peer; })));
  for (const RailPeer& peer : peers_) {
    if (peer.peer_is_my_proxy) tables.returned[idx(peer.host)].resize(local.tokens);
    if (!peer.is_proxy_of_peer) continue;
    CrossedTokens& crossed = tables.crossed[n++];
    crossed.source = peer.rank;
    crossed.count = 0;
    crossed.stride = places_on(own_host_, h.topk);
  }
}

CrossedTokens& HostLinks::crossed_of(const HandleData& h, int source) {
  auto& all = h.hosts->crossed;
  return *std::find_if(all.begin(), all.end(), [&](const CrossedTokens& crossed) { return crossed.source == source; });
}

void HostLinks::prepare_rail(const DispatchParams& p, const HandleData& h, size_t i) {
  const RailPeer& peer = peers_[i];
  const bool fresh = p.shape.with_records, expert_major = p.shape.layout == Layout::expert_major;
  DispatchRail& rail = moving_.rails[i];
  rail = {};
  rail.peer = peer.rank;
  rail.host_ranks = ranks_as_bits(map_, peer.host);
  rail.own_ranks = ranks_as_bits(map_, own_host_);
  rail.arrivals = &arrivals_[i].value;
  const auto lay_out = [&](CrossingRows& rows, PrivateBuffer& slots, int64_t count, int host, bool weights) {
    rows.layout = crossing_layout(p.shape, places_on(host, p.shape.topk), weights);
    rows.count = count;
    rows.per_round = std::max<int64_t>(1, round_bytes_ / rows.layout.bytes());
    rows.slots = grow(slots, kRoundSlots * rows.slot_bytes());
  };
  if (peer.peer_is_my_proxy) {
    const std::vector<int32_t>& leaving = h.hosts->leaving[idx(peer.host)];
    rail.leaving = leaving.data();
    rail.returned = h.hosts->returned[idx(peer.host)].view();
    lay_out(rail.out, sent_[i], static_cast<int64_t>(leaving.size()), peer.host, p.shape.weights != nullptr);
  }
  if (!peer.is_proxy_of_peer) return;
  const Placement& theirs = *p.call.heap.local(p.shape.control.placement(p.call.epoch, peer.rank));
  const bool weights = fresh && theirs.dispatch.sends_weights != 0;
  CrossedTokens& crossed = crossed_of(h, peer.rank);
  if (fresh) {
    const int64_t routes = crossed.count * p.shape.topk;
    crossed.token.resize(idx(crossed.count));
    crossed.ids.resize(idx(routes));
    crossed.route_row.resize(idx(expert_major ? routes : 0));
    crossed.sends.resize(idx(crossed.count * crossed.stride));
    crossed.weights.resize(idx(weights ? routes : 0));
    crossed.returned.resize(crossed.count);
  }
  rail.is_proxy_of_peer = true;
  rail.crossed = crossed.view();
  rail.records = h.counts.touching.data() + peer.rank * h.counts.world;
  lay_out(rail.in, received_[i], crossed.count, own_host_, weights);
}

const HostLinks::Moving& HostLinks::prepare(const DispatchParams& p, const HandleData& h) {
  moving_.rounds = 1;  // sources without crossing tokens are also announced
  for (size_t i = 0; i < peers_.size(); ++i) {
    prepare_rail(p, h, i);
    moving_.rounds = std::max({moving_.rounds, moving_.rails[i].out.rounds(), moving_.rails[i].in.rounds()});
  }
  return moving_;
}

uint64_t HostLinks::post(const Moving& call, uint64_t first, int64_t k) {
  uint64_t sent = 0;
  for (size_t i = 0; i < peers_.size(); ++i) {
    transfers_[i] = transfer_of(call.rails[i], k);
    sent += transfers_[i].send.size();
  }
  carrier().post(first + static_cast<uint64_t>(k), transfers_, nullptr);
  return sent;
}

// ---- combine ----

ReturnedTokens HostLinks::rows_of(const CombineParams& p, int64_t tokens, bool weights) const {
  ReturnedTokens rows = returned_tokens(p.shape, map_, round_bytes_, tokens);
  rows.weights = weights;
  rows.stride = returned_stride(p.shape, weights);
  return rows;
}

void HostLinks::prepare_rail(CpuWarp& w, const CombineParams& p, const HandleData& h, bool weighted, size_t i) {
  const RailPeer& peer = peers_[i];
  CombineRail& rail = summing_.rails[i];
  rail = {};
  rail.peer = peer.rank;
  rail.arrivals = &arrivals_[i].value;
  const auto cut = [&](ReturnedTokens& rows, std::vector<RoundCut>& cuts, PrivateBuffer& slots) {
    cuts.resize(idx(rows.rounds() + 1));
    rows.cuts = cuts.data();
    cut_rounds<Cpu>(w, rows, &rows == &rail.out ? &rail.crossed : nullptr, rail.count);
    rows.slot_bytes = largest_round(rows, rows.cuts);
    rows.slots = grow(slots, kRoundSlots * rows.slot_bytes);
  };
  if (peer.peer_is_my_proxy) {
    rail.peer_is_my_proxy = true;
    rail.in = summing_.own;
    rail.in.counts = h.hosts->returned[idx(peer.host)].view();
    cut(rail.in, cuts_in_[i], received_[i]);
    of_host_[idx(peer.host)] = rail.in;
  }
  if (!peer.is_proxy_of_peer) return;
  CrossedTokens& crossed = crossed_of(h, peer.rank);
  const Placement& theirs = *p.call.heap.local(p.shape.control.placement(p.call.epoch, peer.rank));
  rail.is_proxy_of_peer = true;
  rail.count = crossed.count;
  rail.crossed = crossed.view();
  rail.weighted = weighted;
  rail.out =
      rows_of(p, h.counts.tokens[idx(peer.rank)], p.shape.layout == Layout::rank_major && theirs.pull.takes_weights != 0);
  rail.out.counts = rail.crossed.returned;
  cut(rail.out, cuts_out_[i], sent_[i]);
}

const HostLinks::Summing& HostLinks::prepare(CpuWarp& w, const CombineParams& p, const HandleData& h, bool weighted) {
  summing_.own = rows_of(p, h.tokens, p.shape.layout == Layout::rank_major && p.shape.out_weights != nullptr);
  summing_.rounds = std::max<int64_t>(1, summing_.own.rounds());  // owners without tokens also end their reading
  for (size_t i = 0; i < peers_.size(); ++i) {
    prepare_rail(w, p, h, weighted, i);
    summing_.rounds = std::max(summing_.rounds, summing_.rails[i].out.rounds());
  }
  summing_.hosts = {};
  summing_.hosts.rows = of_host_.data();
  summing_.hosts.host_of = host_of_.data();
  summing_.hosts.hosts = map_.hosts();
  summing_.hosts.own_host = own_host_;
  summing_.hosts.rounds = summing_.rounds;
  return summing_;
}

uint64_t HostLinks::post(const Summing& call, uint64_t first, int64_t k) {
  uint64_t received = 0;
  for (size_t i = 0; i < peers_.size(); ++i) {
    const CombineRail& rail = call.rails[i];
    transfers_[i] = transfer_of(rail, k, rail.out.cuts, rail.in.cuts);
    received += transfers_[i].receive.size();
  }
  carrier().post(first + static_cast<uint64_t>(k), transfers_, nullptr);
  return received;
}

}  // namespace switchyard::detail

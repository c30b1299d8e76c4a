// SPDX-License-Identifier: Apache-2.0
#include "base/index.hpp"
#include "exchange/normal/hosts/links.hpp"

#include <algorithm>

namespace switchyard::detail {

namespace {

ReturnKind return_kind_of(const SumShape& shape) {
  if (shape.order == CombineOrder::per_host) return ReturnKind::per_host;
  return shape.order == CombineOrder::per_route ? ReturnKind::per_route : ReturnKind::per_rank;
}

}  // namespace

HostLinks::HostLinks(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes, uint64_t flags)
    : HostRails(map, rank, std::move(carrier), round_bytes, flags) {
  rows_out_.resize(peers_.size());
  rows_in_.resize(peers_.size());
  dispatch_rails_.resize(peers_.size());
  combine_rails_.resize(peers_.size());
}

int HostLinks::places_on(int host, int topk) const { return std::min(topk, static_cast<int>(map_.ranks_of(host).size())); }

void HostLinks::list_leaving(const LocalPlan& local, HandleData& h) const {
  if (!h.hosts || h.hosts.use_count() > 1) h.hosts = std::make_shared<HostTables>();
  HostTables& tables = *h.hosts;
  tables.host_of = host_of_;
  detail::list_leaving(local, host_of_, own_host_, map_.hosts(), tables.leaving);
  size_t n = 0;
  tables.crossed.resize(
      idx(std::count_if(peers_.begin(), peers_.end(), [](const RailPeer& peer) { return peer.is_proxy_of_peer; })));
  for (const RailPeer& peer : peers_) {
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
  DispatchRail& rail = dispatch_rails_[i];
  rail = {};
  rail.peer = peer.rank;
  rail.host = peer.host;
  const auto lay_out = [&](CrossingRows& rows, Ring& ring, int64_t count, int host, bool weights) {
    rows.count = count;
    rows.layout = {p.shape.topk,       places_on(host, p.shape.topk), fresh, expert_major, weights, p.shape.row_bytes,
                   p.shape.scale_bytes};
    rows.stride = rows.layout.bytes();
    rows.per_round = std::max<int64_t>(1, round_bytes_ / rows.stride);
    make_slots(ring, std::min(count, rows.per_round) * rows.stride, rows.slots);
  };
  if (peer.peer_is_my_proxy) {
    const std::vector<int32_t>& leaving = h.hosts->leaving[idx(peer.host)];
    rail.leaving = leaving.data();
    lay_out(rail.out, sent_[i], static_cast<int64_t>(leaving.size()), peer.host, p.shape.weights != nullptr);
  }
  if (!peer.is_proxy_of_peer) return;
  const Placement& theirs = *p.call.heap.local(p.shape.control.placement(p.call.epoch, peer.rank));
  const bool weights = fresh && theirs.dispatch.sends_weights != 0;
  CrossedTokens& crossed = crossed_of(h, peer.rank);
  rail.is_proxy_of_peer = true;
  rail.crossed = &crossed;
  rail.source_tokens = h.counts.tokens[idx(peer.rank)];
  lay_out(rail.in, received_[i], crossed.count, own_host_, weights);
  if (fresh) {
    const int64_t routes = crossed.count * p.shape.topk;
    crossed.token.resize(idx(crossed.count));
    crossed.ids.resize(idx(routes));
    crossed.route_row.resize(idx(expert_major ? routes : 0));
    crossed.sends.resize(idx(crossed.count * crossed.stride));
    crossed.weights.resize(idx(weights ? routes : 0));
  }
  rail.forward = p;
  rail.forward.tokens = crossed.count;
  rail.forward.shape.weights = weights ? crossed.weights.data() : nullptr;
  rail.forward.tables.sends = {crossed.sends.data(), nullptr, crossed.stride};
  rail.forward.tables.ids = crossed.ids.data();
  rail.forward.tables.route_row = crossed.route_row.data();
}

const HostDispatchParams& HostLinks::prepare(const DispatchParams& p, const HandleData& h) {
  int64_t rounds = 0;
  for (size_t i = 0; i < peers_.size(); ++i) {
    prepare_rail(p, h, i);
    rounds = std::max({rounds, dispatch_rails_[i].out.rounds(), dispatch_rails_[i].in.rounds()});
  }
  dispatch_ = {
      p, take_rounds(rounds), dispatch_rails_.data(), transfers_.data(), static_cast<int>(peers_.size()), host_of_.data()};
  return dispatch_;
}

ReturnedRows HostLinks::rounds_of(const CombineParams& p, int64_t tokens, bool weights) const {
  const ReturnKind rows = return_kind_of(p.shape);
  const int topk = p.shape.topk;
  const int64_t max = rows == ReturnKind::per_host ? 1 : rows == ReturnKind::per_route ? topk : std::min(topk, map_.world());
  ReturnedRows r;
  r.tokens = tokens;
  r.weights = weights;
  r.stride = p.shape.row_bytes + (weights ? round_up(int64_t{4} * topk, 16) : 0);
  r.tokens_per_round = std::max<int64_t>(1, round_bytes_ / (max * r.stride));
  return r;
}

void HostLinks::prepare_rail(const CombineParams& p, const HandleData& h, bool weighted, size_t i) {
  const RailPeer& peer = peers_[i];
  const ReturnKind rows = return_kind_of(p.shape);
  const int topk = p.shape.topk;
  CombineRail& rail = combine_rails_[i];
  rail = {};
  rail.peer = peer.rank;
  if (peer.peer_is_my_proxy) {
    std::vector<int64_t>& before = rows_in_[i];
    before.assign(1, 0);
    for (int64_t t = 0; t < h.tokens; ++t) {
      const BackTables token{p.tables.sends.of(t), p.tables.sends.places(t), h.ids.data() + t * topk,
                             h.route_row.data() + t * topk};
      before.push_back(before.back() + count_returned_rows(token, rows, topk, h.map, host_of_, peer.host));
    }
    rail.peer_is_my_proxy = true;
    rail.in = combine_.own;
    rail.in.rows_before = before.data();
    make_slots(received_[i], largest_round(rail.in.rounds(), [&](int64_t k) { return rail.in_bytes(k); }), rail.in.slots);
  }
  if (!peer.is_proxy_of_peer) return;
  const CrossedTokens& crossed = crossed_of(h, peer.rank);
  const Placement& theirs = *p.call.heap.local(p.shape.control.placement(p.call.epoch, peer.rank));
  std::vector<int64_t>& before = rows_out_[i];
  before.assign(1, 0);
  for (int64_t n = 0; n < crossed.count; ++n) {
    const BackTables token{crossed.sends.data() + n * crossed.stride, crossed.stride, crossed.ids.data() + n * topk,
                           crossed.route_row.data() + n * topk};
    before.push_back(before.back() + count_returned_rows(token, rows, topk, h.map, host_of_, own_host_));
  }
  rail.is_proxy_of_peer = true;
  rail.crossed = &crossed;
  rail.out =
      rounds_of(p, h.counts.tokens[idx(peer.rank)], p.shape.layout == Layout::rank_major && theirs.pull.takes_weights != 0);
  rail.out.rows_before = before.data();
  make_slots(sent_[i], largest_round(rail.out.rounds(), [&](int64_t k) { return rail.out_bytes(k); }), rail.out.slots);
  rail.sum = p;
  rail.sum.tokens = crossed.count;
  rail.sum.weights = weighted && !crossed.weights.empty() ? crossed.weights.data() : nullptr;
  rail.sum.tables.sends = {crossed.sends.data(), nullptr, crossed.stride};
  rail.sum.tables.ids = crossed.ids.data();
  rail.sum.tables.route_row = crossed.route_row.data();
}

const HostCombineParams& HostLinks::prepare(const CombineParams& p, const HandleData& h, bool weighted) {
  combine_.own = rounds_of(p, h.tokens, p.shape.out_weights != nullptr);
  int64_t rounds = combine_.own.rounds();
  for (size_t i = 0; i < peers_.size(); ++i) {
    prepare_rail(p, h, weighted, i);
    rounds = std::max(rounds, combine_rails_[i].out.rounds());
  }
  combine_.sum = p;
  combine_.rounds = take_rounds(rounds);
  combine_.rails = combine_rails_.data();
  combine_.transfers = transfers_.data();
  combine_.num_rails = static_cast<int>(peers_.size());
  combine_.return_kind = return_kind_of(p.shape);
  combine_.rail_of_host = rail_of_host_.data();
  combine_.hosts = map_.hosts();
  combine_.host_of = host_of_.data();
  return combine_;
}

}  // namespace switchyard::detail

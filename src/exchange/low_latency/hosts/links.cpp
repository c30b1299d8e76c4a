// SPDX-License-Identifier: Apache-2.0
#include "base/index.hpp"
#include "exchange/low_latency/hosts/links.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace switchyard::detail {

LowLatencyLinks::LowLatencyLinks(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes,
                                 uint64_t flags, const LowLatencyLayout& layout)
    : HostRails(map, rank, std::move(carrier), round_bytes, flags),
      layout_(layout),
      plan_(map, rank),
      experts_(idx(map.hosts())),
      counts_(idx(layout.map.experts)),
      leaving_(idx(map.hosts())),
      crossing_(idx(map.world())),
      message_rails_(peers_.size()),
      return_rails_(peers_.size()),
      rows_out_(peers_.size()),
      rows_in_(peers_.size()) {
  for (int32_t e = 0; e < layout.map.experts; ++e) experts_[idx(map.host_of(layout.owner(e)))].push_back(e);
  for (const RailPeer& peer : peers_) host_of_rail_.push_back(peer.host);
  remote_ = RemoteReturns(layout, plan_.max_sources);
}

void LowLatencyLinks::set_returned(std::unique_ptr<SymmetricHeap> memory) {
  returned_ = std::move(memory);
  remote_.heap = returned_->view();
  remote_.proxy = plan_.proxy.data();
  remote_.number = plan_.number.data();
}

CrossedTokens& LowLatencyLinks::crossed_of(CrossedOutput& output, int source) const {
  return output.crossed[idx(plan_.number[idx(source)])];
}

void LowLatencyLinks::list_leaving(const LowLatencyDispatchParams& p) {
  const LowLatencyLayout& l = p.layout;
  std::fill(counts_.begin(), counts_.end(), 0);
  for (auto& tokens : leaving_) tokens.clear();
  for (int t = 0; t < p.tokens; ++t) {
    for (int k = 0; k < l.topk; ++k) {
      const int32_t expert = p.ids(t * l.topk + k);
      bool again = expert < 0;
      for (int j = 0; j < k && !again; ++j) again = p.ids(t * l.topk + j) == expert;
      if (again) continue;
      ++counts_[idx(expert)];
      const int host = host_of_[idx(l.owner(expert))];
      if (host != own_host_ && (leaving_[idx(host)].empty() || leaving_[idx(host)].back() != t))
        leaving_[idx(host)].push_back(t);
    }
  }
}

ItemsInRounds LowLatencyLinks::in_rounds(int64_t count, Ring& ring) const {
  ItemsInRounds items;
  items.count = count;
  items.stride = CrossingMessage(layout_).bytes;
  items.per_round = std::max({int64_t{1}, round_bytes_ / items.stride, (count + kRoundSlots - 1) / kRoundSlots});
  make_slots(ring, std::min(count, items.per_round) * items.stride, items.slots);
  return items;
}

const MessageRails& LowLatencyLinks::begin(const LowLatencyDispatchParams& p) {
  list_leaving(p);
  const auto relayed_bytes = [](size_t experts) { return sizeof(uint64_t) + 4 * experts; };
  const uint64_t header = dispatch_header(p.tokens);
  relay_ = take_round();
  post_relay(
      p.call, carrier(), relay_, peers_, [&](const RailPeer& peer) { return relayed_bytes(experts_[idx(peer.host)].size()); },
      [&](const RailPeer&) { return relayed_bytes(experts_[idx(own_host_)].size()); },
      [&](const RailPeer& peer) { return static_cast<int64_t>(leaving_[idx(peer.host)].size()); },
      [&](const RailPeer& peer, std::byte* to) {
        std::memcpy(to, &header, sizeof header);
        auto* counts = reinterpret_cast<int32_t*>(to + sizeof header);
        for (const int32_t expert : experts_[idx(peer.host)]) *counts++ = counts_[idx(expert)];
      });
  int64_t rounds = 0;
  for (size_t i = 0; i < peers_.size(); ++i) {
    MessageRail& rail = message_rails_[i];
    rail = {};
    rail.peer = peers_[i].rank;
    rail.is_proxy_of_peer = peers_[i].is_proxy_of_peer;
    if (!peers_[i].peer_is_my_proxy) continue;
    const std::vector<int32_t>& leaving = leaving_[idx(peers_[i].host)];
    rail.leaving = leaving.data();
    rail.out = in_rounds(static_cast<int64_t>(leaving.size()), sent_[i]);
    rounds = std::max(rounds, rail.out.rounds());
  }
  messages_ = {take_rounds(rounds), {}, message_rails_.data(), transfers_.data(), static_cast<int>(peers_.size())};
  return messages_;
}

const MessageRails& LowLatencyLinks::receive(const LowLatencyDispatchParams& p, CrossedOutput& output) {
  output.host_of = host_of_;
  output.crossed.resize(plan_.sources.size());
  int64_t rounds = 0;
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].is_proxy_of_peer) continue;
    MessageRail& rail = message_rails_[i];
    CrossedTokens& crossed = crossed_of(output, rail.peer);
    crossed.source = rail.peer;
    crossed.count = crossing_[idx(rail.peer)];
    crossed.token.resize(idx(crossed.count));
    crossed.ids.resize(idx(crossed.count * p.layout.topk));
    rail.crossed = &crossed;
    rail.tokens = tokens_of(p.call, p.layout, rail.peer);
    rail.in = in_rounds(crossed.count, received_[i]);
    rounds = std::max(rounds, rail.in.rounds());
  }
  messages_.in = take_rounds(rounds);
  for (int64_t k = 0; k < rounds; ++k) {
    for (size_t i = 0; i < peers_.size(); ++i) {
      const ItemsInRounds& in = message_rails_[i].in;
      transfers_[i] = {peers_[i].rank, {}, {in.slot(k), idx(in.bytes(k))}};
    }
    carrier().post(messages_.in.first + static_cast<uint64_t>(k), transfers_, nullptr);
  }
  return messages_;
}

void LowLatencyLinks::begin(const LowLatencyCombineParams& p) {
  const uint64_t header = p.header();
  const auto size = [](const RailPeer&) { return sizeof(uint64_t); };
  relay_ = take_round();
  post_relay(
      p.call, carrier(), relay_, peers_, size, size, [](const RailPeer&) { return int64_t{0}; },
      [&](const RailPeer&, std::byte* to) { std::memcpy(to, &header, sizeof header); });
}

ReturnedRows LowLatencyLinks::rounds_of(const LowLatencyCombineParams& p, int64_t tokens) const {
  const int topk = p.layout.topk;
  const int64_t max = p.order == CombineOrder::per_route ? topk : std::min(topk, map_.world());
  ReturnedRows r;
  r.tokens = tokens;
  r.stride = round_up(p.row_bytes, 16);
  r.tokens_per_round = std::max<int64_t>(1, round_bytes_ / (max * r.stride));
  return r;
}

void LowLatencyLinks::prepare_rail(const RemoteCombineParams& p, const CrossedOutput& output, size_t i) {
  const RailPeer& peer = peers_[i];
  const LowLatencyLayout& l = p.layout;
  ReturnRail& rail = return_rails_[i];
  rail = {};
  rail.peer = peer.rank;
  const auto count = [&](std::vector<int64_t>& before, const int32_t* ids, int64_t tokens, int host) {
    before.assign(1, 0);
    for (int64_t t = 0; t < tokens; ++t, ids += l.topk)
      before.push_back(before.back() + bits(slots_from(
                                           l, p.order, [ids](int k) { return ids[k]; }, host_of_.data(), host)));
    return before.data();
  };
  if (peer.peer_is_my_proxy) {
    rail.peer_is_my_proxy = true;
    rail.in = returns_.own;
    rail.in.rows_before = count(rows_in_[i], p.own_ids, rail.in.tokens, peer.host);
    make_slots(received_[i], largest_round(rail.in.rounds(), [&](int64_t k) { return rail.in_bytes(k); }), rail.in.slots);
  }
  if (!peer.is_proxy_of_peer) return;
  const CrossedTokens& crossed = output.crossed[idx(plan_.number[idx(peer.rank)])];
  rail.is_proxy_of_peer = true;
  rail.crossed = &crossed;
  rail.out = rounds_of(p, p.source_tokens[peer.rank]);
  rail.out.rows_before = count(rows_out_[i], crossed.ids.data(), crossed.count, own_host_);
  make_slots(sent_[i], largest_round(rail.out.rounds(), [&](int64_t k) { return rail.out_bytes(k); }), rail.out.slots);
}

const ReturnRails& LowLatencyLinks::receive(const RemoteCombineParams& p, const CrossedOutput& output) {
  returns_.own = rounds_of(p, p.own->tokens);
  int64_t rounds = returns_.own.rounds();
  for (size_t i = 0; i < peers_.size(); ++i) {
    prepare_rail(p, output, i);
    if (peers_[i].is_proxy_of_peer) rounds = std::max(rounds, return_rails_[i].out.rounds());
  }
  returns_.rounds = take_rounds(rounds);
  returns_.rails = return_rails_.data();
  returns_.host_of_rail = host_of_rail_.data();
  returns_.transfers = transfers_.data();
  returns_.num_rails = static_cast<int>(peers_.size());
  returns_.host_of = host_of_.data();
  returns_.own_host = own_host_;
  return returns_;
}

}  // namespace switchyard::detail

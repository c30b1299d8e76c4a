// SPDX-License-Identifier: Apache-2.0
#include "base/index.hpp"
#include "exchange/low_latency/hosts/links.hpp"

#include <algorithm>
#include <utility>

namespace switchyard::detail {

LowLatencyLinks::LowLatencyLinks(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes,
                                 const LowLatencyLayout& layout)
    : HostRails(map, rank, std::move(carrier), std::min(round_bytes, kMaxRoundBytes)), layout_(layout), plan_(map, rank) {
  remote_.rails = plan_.rails.data();
  remote_.host_of = plan_.host_of.data();
  remote_.rail_of_host = plan_.rail_of_host.data();
  remote_.num_rails = static_cast<int>(plan_.rails.size());
  remote_.own_host = plan_.own_host;
  remote_.own_ranks = plan_.own_ranks;
  remote_.stride = rail_bytes(layout);
  remote_.sent = grow(sent_[0], remote_.num_rails * remote_.stride);
  remote_.received = grow(received_[0], remote_.num_rails * remote_.stride);
  returns_ = RemoteReturns(layout, plan_.max_sources);
  placed_.resize(plan_.rails.size() * 2 * idx(layout.max_tokens + 1));
}

void LowLatencyLinks::set_returned(std::unique_ptr<SymmetricHeap> memory) {
  returned_ = std::move(memory);
  returns_.heap = returned_->view();
  returns_.proxy = plan_.proxy.data();
  returns_.number = plan_.number.data();
}

CrossedIds LowLatencyLinks::take_crossed(CrossedOutput& output) const {
  output.host_of = host_of_;
  output.ids.resize(plan_.sources.size() * idx(int64_t{layout_.max_tokens} * layout_.topk));
  return {output.ids.data()};
}

PhasedCombineParams LowLatencyLinks::phased(const LowLatencyCombineParams& p, CrossedOutput& output) const {
  PhasedCombineParams phased;
  static_cast<LowLatencyCombineParams&>(phased) = p;
  phased.remote = returns_;
  phased.rails = remote_;
  phased.crossed = {output.ids.data()};
  phased.placed = placed_.data();
  phased.round_bytes = round_bytes_;
  return phased;
}

int64_t LowLatencyLinks::place_rows(const PhasedCombineParams& p) {
  int64_t rounds = 1;
  const auto place = [&](int rail, bool received, int64_t count, int host, const auto& ids) {
    CrossingSlots* const rows = placed_.data() + (p.placed_of(rail, received) - p.placed);
    int64_t before = 0;
    for (int t = 0; t < count; ++t) {
      const int32_t* const chosen = ids(t);
      const auto id = [chosen](int k) { return chosen[k]; };
      rows[t] = {slots_from(layout_, p.order, id, remote_.host_of, host), before};
      before += bits(rows[t].slots);
    }
    rows[count] = {0, before};
    const int64_t per_round = (received ? p.received(rail) : p.sent(rail)).tokens_per_round(round_bytes_);
    rounds = std::max(rounds, (count + per_round - 1) / per_round);
  };
  for (int i = 0; i < remote_.num_rails; ++i) {
    const RemoteRail& rail = remote_.rails[i];
    if (rail.is_proxy_of_peer != 0)
      place(i, false, p.source_tokens[rail.rank], remote_.own_host,
            [&](int t) { return p.crossed.of(layout_, rail.source, t); });
    if (rail.peer_is_my_proxy != 0)
      place(i, true, p.own->tokens, rail.host, [&](int t) { return p.own_ids + int64_t{t} * layout_.topk; });
  }
  return rounds;
}

uint64_t LowLatencyLinks::received_bytes(const PhasedCombineParams& p) const {
  int64_t rows = 0;
  for (int i = 0; i < remote_.num_rails; ++i)
    if (remote_.rails[i].peer_is_my_proxy != 0) rows += p.received(i).rows(p.own->tokens);
  return static_cast<uint64_t>(rows * p.row_bytes);
}

void LowLatencyLinks::post_dispatch(uint64_t round) {
  carrier().post(round, dispatch_transfers(plan_, remote_, layout_), nullptr);
}

void LowLatencyLinks::post_combine(const PhasedCombineParams& p, uint64_t first, int64_t k) {
  carrier().post(first + static_cast<uint64_t>(k), combine_transfers(plan_, p, k), nullptr);
  if (k > 0) (void)carrier().advance(first);  // MPI transfers large messages only during MPI calls
}

}  // namespace switchyard::detail

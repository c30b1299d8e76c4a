// SPDX-License-Identifier: Apache-2.0
#include "base/index.hpp"
#include "exchange/low_latency/hosts/links.hpp"

#include <utility>

namespace switchyard::detail {

LowLatencyLinks::LowLatencyLinks(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, const LowLatencyLayout& layout)
    : HostRails(map, rank, std::move(carrier), 0), layout_(layout), plan_(map, rank) {
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
  first_rows_.resize(plan_.rails.size() * 2 * idx(layout.max_tokens + 1));
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
  phased.first_rows = first_rows_.data();
  return phased;
}

void LowLatencyLinks::place_rows(const PhasedCombineParams& p) {
  const auto count = [&](int32_t* first, int64_t tokens, const int* host_of, int host, const auto& ids) {
    *first = 0;
    for (int t = 0; t < tokens; ++t, ++first) {
      const auto id = [&](int k) { return ids(t)[k]; };
      first[1] = *first + bits(slots_from(layout_, p.order, id, host_of, host));
    }
  };
  const auto at = [&](int rail, bool received) { return first_rows_.data() + (p.first(rail, received) - p.first_rows); };
  for (int i = 0; i < remote_.num_rails; ++i) {
    const RemoteRail& rail = remote_.rails[i];
    if (rail.is_proxy_of_peer != 0)
      count(at(i, false), p.source_tokens[rail.rank], remote_.host_of, remote_.own_host,
            [&](int t) { return p.crossed.of(layout_, rail.source, t); });
    if (rail.peer_is_my_proxy != 0)
      count(at(i, true), p.own->tokens, remote_.host_of, rail.host, [&](int t) { return p.own_ids + t * layout_.topk; });
  }
}

void LowLatencyLinks::post_dispatch() { post(dispatch_transfers(plan_, remote_, layout_)); }
void LowLatencyLinks::post_combine(const PhasedCombineParams& p) { post(combine_transfers(plan_, p)); }

void LowLatencyLinks::post(const std::vector<PeerTransfer>& transfers) {
  round_ = take_round();
  carrier().post(round_, transfers, nullptr);
}

}  // namespace switchyard::detail

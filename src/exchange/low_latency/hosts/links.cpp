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
  return phased;
}

void LowLatencyLinks::post_dispatch() { post(dispatch_transfers(plan_, remote_, layout_)); }
void LowLatencyLinks::post_combine(const LowLatencyCombineParams& p) { post(combine_transfers(plan_, remote_, p)); }

void LowLatencyLinks::post(const std::vector<PeerTransfer>& transfers) {
  round_ = take_round();
  carrier().post(round_, transfers, nullptr);
}

}  // namespace switchyard::detail

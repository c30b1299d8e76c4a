// SPDX-License-Identifier: Apache-2.0
#include "exchange/slots/weight_rails.hpp"

#include <algorithm>

#include "base/index.hpp"
#include "exchange/hosts/await_round.hpp"
#include "exchange/hosts/connect.hpp"
#include "exchange/hosts/rails.hpp"

namespace switchyard::detail {

namespace {

class CpuWeightRails final : public WeightRails, private HostRails {
 public:
  explicit CpuWeightRails(Group::Impl& group)
      : HostRails(group.host_map(), group.bootstrap->rank(), connect_hosts(group), group.round_bytes), group_(group) {}

  void reserve(std::span<const RailTransfer> transfers) override {
    release();
    for (const RailTransfer& transfer : transfers) {
      const size_t i = index_of(transfer.peer);
      grow(sent_[i], static_cast<int64_t>(transfer.send));
      grow(received_[i], static_cast<int64_t>(transfer.receive));
    }
  }
  void release() noexcept override {
    for (std::vector<PrivateBuffer>* buffers : {&sent_, &received_})
      for (PrivateBuffer& buffer : *buffers) buffer = {};
  }
  std::byte* outgoing(int peer) override { return sent_[index_of(peer)].data.get(); }
  const std::byte* incoming(int peer) const override { return received_[index_of(peer)].data.get(); }

  void exchange(std::span<const RailTransfer> transfers) override {
    transfers_.clear();
    for (const RailTransfer& transfer : transfers) {
      const size_t i = index_of(transfer.peer);
      transfers_.push_back({transfer.peer, {sent_[i].data.get(), transfer.send}, {received_[i].data.get(), transfer.receive}});
    }
    CallContext call = group_.begin_call(Operation::barrier);
    call.epoch = take_round();
    carrier().post(call.epoch, transfers_, nullptr);
    if (await_round<Cpu>(solo_, call, carrier(), call.epoch)) return;
    carrier().abort();
    group_.raise_fault("move_weights", call.epoch);
  }

 private:
  size_t index_of(int peer) const {
    return idx(std::find_if(peers_.begin(), peers_.end(), [&](const RailPeer& each) { return each.rank == peer; }) -
               peers_.begin());
  }

  Group::Impl& group_;
  CpuWarp solo_{0, 0, 1, 1, nullptr};
};

}  // namespace

std::shared_ptr<WeightRails> weight_rails_on_cpu(Group::Impl& group) {
  if (!group.weight_rails)
    group.collectively("move_weights", [&] { group.weight_rails = std::make_shared<CpuWeightRails>(group); });
  return group.weight_rails;
}

}  // namespace switchyard::detail

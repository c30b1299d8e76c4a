// SPDX-License-Identifier: Apache-2.0
#include "testing/test_access.hpp"

#include <span>
#include <utility>

#include "carrier/carrier.hpp"
#include "exchange/fused/impl.hpp"
#include "exchange/ledger/impl.hpp"
#include "exchange/low_latency/impl.hpp"
#include "exchange/normal/impl.hpp"

namespace switchyard::detail {

namespace {

/// Runs before main(), because ranks are threads.
[[maybe_unused]] const bool made_known = [] {
  make_deferred<NormalImpl, NormalConfig> = NormalImpl::make_on_cpu<CpuDeferred>;
  make_deferred<LowLatencyImpl, LowLatencyConfig> = LowLatencyImpl::make_on_cpu<CpuDeferred>;
  make_deferred<LedgerImpl, LedgerConfig> = LedgerImpl::make_on_cpu<CpuDeferred>;
  make_deferred<FusedImpl, FusedOnCpu> = FusedImpl::make_on_cpu<CpuDeferred>;
  return true;
}();

/// Calls a function before each round.
class WatchedCarrier final : public Carrier {
 public:
  using Watch = std::function<void(std::span<const PeerTransfer>)>;
  WatchedCarrier(std::unique_ptr<Carrier> carrier, Watch watch) : carrier_(std::move(carrier)), watch_(std::move(watch)) {}
  void share(std::shared_ptr<const void> memory) override { carrier_->share(std::move(memory)); }
  void post(uint64_t round, std::span<const PeerTransfer> transfers, void* stream) override {
    watch_(transfers);
    carrier_->post(round, transfers, stream);
  }
  RoundStatus advance(uint64_t round) override { return carrier_->advance(round); }
  void abort() noexcept override { carrier_->abort(); }

 private:
  std::unique_ptr<Carrier> carrier_;
  Watch watch_;
};

void watch_rounds(Group& group, const WatchedCarrier::Watch& watch) {
  group.impl().wrap_carrier = [watch](std::unique_ptr<Carrier> carrier) {
    return std::make_unique<WatchedCarrier>(std::move(carrier), watch);
  };
}

}  // namespace

void count_carried(Group& group, Carried& carried) {
  watch_rounds(group, [&carried](std::span<const PeerTransfer> transfers) {
    for (const PeerTransfer& transfer : transfers) {
      carried.sent += transfer.send.size();
      carried.received += transfer.receive.size();
    }
    ++carried.rounds;
  });
}

void watch_carried(Group& group, const std::function<void(size_t)>& see) {
  watch_rounds(group, [see](std::span<const PeerTransfer> transfers) {
    size_t bytes = 0;
    for (const PeerTransfer& transfer : transfers) bytes += transfer.send.size() + transfer.receive.size();
    see(bytes);
  });
}

void before_rounds(Group& group, const std::function<void()>& act) {
  watch_rounds(group, [act](std::span<const PeerTransfer>) { act(); });
}

void number_calls_from(Group& group, uint64_t first_epoch) { group.impl().first_epoch = first_epoch; }

void cross_in_rounds_of(Group& group, int64_t bytes) { group.impl().round_bytes = bytes; }

size_t heap_used_after_work(Group& group) {
  if (group.impl().device) group.impl().device->await_ended(group.impl().options.rendezvous_timeout);
  return group.heap_used();
}

void defer_copies(Group& group) { group.impl().defers_copies = true; }

}  // namespace switchyard::detail

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

class CountingCarrier final : public Carrier {
 public:
  CountingCarrier(std::unique_ptr<Carrier> carrier, Carried& carried) : carrier_(std::move(carrier)), carried_(carried) {}
  void share(std::shared_ptr<const void> memory) override { carrier_->share(std::move(memory)); }
  void post(uint64_t round, std::span<const PeerTransfer> transfers, void* stream) override {
    for (const PeerTransfer& transfer : transfers) {
      carried_.sent += transfer.send.size();
      carried_.received += transfer.receive.size();
    }
    ++carried_.rounds;
    carrier_->post(round, transfers, stream);
  }
  RoundStatus advance(uint64_t round) override { return carrier_->advance(round); }
  void abort() noexcept override { carrier_->abort(); }

 private:
  std::unique_ptr<Carrier> carrier_;
  Carried& carried_;
};

}  // namespace

void count_carried(Group& group, Carried& carried) {
  group.impl().wrap_carrier = [&carried](std::unique_ptr<Carrier> carrier) {
    return std::make_unique<CountingCarrier>(std::move(carrier), carried);
  };
}

void number_calls_from(Group& group, uint64_t first_epoch) { group.impl().first_epoch = first_epoch; }

void cross_in_rounds_of(Group& group, int64_t bytes) { group.impl().round_bytes = bytes; }

size_t heap_used_after_work(Group& group) {
  if (group.impl().device) group.impl().device->await_ended(group.impl().options.rendezvous_timeout);
  return group.heap_used();
}

void defer_copies(Group& group) { group.impl().defers_copies = true; }

}  // namespace switchyard::detail

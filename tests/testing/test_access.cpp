// SPDX-License-Identifier: Apache-2.0
#include "testing/test_access.hpp"

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

}  // namespace

void number_calls_from(Group& group, uint64_t first_epoch) { group.impl().first_epoch = first_epoch; }

void cross_in_rounds_of(Group& group, int64_t bytes) { group.impl().round_bytes = bytes; }

size_t heap_used_after_work(Group& group) {
  if (group.impl().device) group.impl().device->await_ended(group.impl().options.rendezvous_timeout);
  return group.heap_used();
}

void defer_copies(Group& group) { group.impl().defers_copies = true; }

}  // namespace switchyard::detail

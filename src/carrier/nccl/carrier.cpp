// SPDX-License-Identifier: Apache-2.0
#include "carrier/nccl/carrier.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "carrier/nccl/rounds.hpp"

namespace switchyard::detail {
namespace {

using Clock = NcclComms::Clock;
constexpr std::chrono::milliseconds kFlushTime{1000};

class NcclCarrier final : public NcclRounds {
 public:
  explicit NcclCarrier(std::unique_ptr<NcclComms> comms) : NcclRounds(std::move(comms)) {}

  ~NcclCarrier() override {
    const Clock::time_point until = Clock::now() + kFlushTime;
    std::vector<NcclComm> left;
    for (const NcclComm comm : comms().take())
      if (has_failed() || !comms().finish(comm, until)) left.push_back(comm);
    detail::end_elsewhere(comms().api(), std::move(left));
  }

 private:
  bool enqueue(std::span<const PeerTransfer> transfers, void* stream, int peer) override {
    const NcclApi& api = comms().api();
    std::vector<NcclComm> used;
    if (!ok(api.group_start(), -1)) return false;
    bool good = true;
    for (const PeerTransfer& transfer : transfers) {
      if (transfer.send.empty() && transfer.receive.empty()) continue;
      const int rail = comms().rail_to(transfer.peer);
      const NcclComm comm = comms().all()[static_cast<size_t>(rail)];
      const int to = comms().place_on(rail, transfer.peer);
      good = good && enqueued(transfer.send.empty()
                                  ? kNcclSuccess
                                  : api.send(transfer.send.data(), transfer.send.size(), kNcclBytes, to, comm, stream),
                              transfer.peer);
      good = good && enqueued(transfer.receive.empty()
                                  ? kNcclSuccess
                                  : api.receive(transfer.receive.data(), transfer.receive.size(), kNcclBytes, to, comm, stream),
                              transfer.peer);
      if (std::find(used.begin(), used.end(), comm) == used.end()) used.push_back(comm);
    }
    if (!enqueued(api.group_end(), peer) || !good) return false;
    const Clock::time_point until = Clock::now() + comms().spec().deadline;
    const auto stop = [this] { return is_stopped() || comms().spec().interrupted(); };
    for (const NcclComm comm : used)
      if (!ok(comms().settle(comm, kNcclInProgress, until, stop), peer)) return false;
    return true;
  }

  void end_elsewhere() noexcept override { detail::end_elsewhere(comms().api(), comms().take()); }

  bool ok(int result, int peer) { return result == kNcclSuccess || fail(peer); }
  bool enqueued(int result, int peer) { return is_healthy(result) || fail(peer); }
};

}  // namespace

std::unique_ptr<Carrier> make_nccl_carrier(std::unique_ptr<NcclComms> comms) {
  return std::make_unique<NcclCarrier>(std::move(comms));
}

}  // namespace switchyard::detail

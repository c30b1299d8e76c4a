// SPDX-License-Identifier: Apache-2.0
#include "carrier/nccl/carrier.hpp"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kLook{50};
constexpr std::chrono::milliseconds kFlushTime{1000};

/// A round on the stream.
struct Posted {
  uint64_t round;
  int peer;  ///< of its only leg, or -1
  std::shared_ptr<const void> mark;
};

/// Ends communicators where nobody waits for it: NCCL may wait for the GPU.
void abort_all(const NcclApi& api, std::vector<NcclComm> comms) {
  if (comms.empty()) return;
  std::thread([abort = api.abort, held = std::move(comms)] {
    for (const NcclComm comm : held) (void)abort(comm);
  }).detach();
}

class NcclCarrier final : public Carrier {
 public:
  NcclCarrier(const NcclApi& api, NcclCarrierSpec spec) : api_(api), spec_(std::move(spec)) {
    try {
      for (const NcclRail& rail : spec_.rails) connect(rail);
    } catch (...) {
      end();
      throw;
    }
  }

  ~NcclCarrier() override {
    const std::vector<NcclComm> comms = take_comms();
    const Clock::time_point until = Clock::now() + kFlushTime;
    std::vector<NcclComm> left;
    for (const NcclComm comm : comms) {
      const bool flushed = !broken_.load() && settle(comm, api_.finalize(comm), until, [] { return false; }) == kNcclSuccess;
      if (!flushed || api_.destroy(comm) != kNcclSuccess) left.push_back(comm);
    }
    try {
      abort_all(api_, std::move(left));
    } catch (const std::exception&) {
      // No thread can be made: the communicators stay.
    }
  }

  void post(uint64_t round, std::span<const Leg> legs, void* stream) override {
    const std::lock_guard lock(mutex_);
    if (broken_.load()) return;
    std::vector<NcclComm> used;
    int num_legs = 0, last_peer = -1;
    if (!ok(api_.group_start(), -1)) return;
    bool good = true;
    for (const Leg& leg : legs) {
      if (leg.send.empty() && leg.receive.empty()) continue;
      const int rail = spec_.rail_to(leg.peer);
      if (rail < 0 || static_cast<size_t>(rail) >= comms_.size()) {
        good = fail(leg.peer);
        break;
      }
      const NcclComm comm = comms_[static_cast<size_t>(rail)];
      const int to = place_on(rail, leg.peer);
      good = good && enqueued(leg.send.empty() ? kNcclSuccess
                                               : api_.send(leg.send.data(), leg.send.size(), kNcclBytes, to, comm, stream),
                              leg.peer);
      good = good &&
             enqueued(leg.receive.empty() ? kNcclSuccess
                                          : api_.receive(leg.receive.data(), leg.receive.size(), kNcclBytes, to, comm, stream),
                      leg.peer);
      if (std::find(used.begin(), used.end(), comm) == used.end()) used.push_back(comm);
      ++num_legs;
      last_peer = leg.peer;
    }
    const int peer = num_legs == 1 ? last_peer : -1;
    if (!enqueued(api_.group_end(), peer) || !good || num_legs == 0) return;
    const Clock::time_point until = Clock::now() + spec_.deadline;
    for (const NcclComm comm : used)
      if (!ok(settle(comm, kNcclInProgress, until, [this] { return stop_ || spec_.interrupted(); }), peer)) return;
    posted_.push_back({round, peer, spec_.marks->mark(stream)});
  }

  RoundLook advance(uint64_t round) override {
    const std::lock_guard lock(mutex_);
    for (const NcclComm comm : comms_) {
      int error = kNcclSuccess;
      if (api_.async_error(comm, &error) != kNcclSuccess || !is_well(error)) fail(-1);
    }
    if (broken_.load()) return {RoundState::broken, broken_by_};
    while (!posted_.empty() && spec_.marks->reached(posted_.front().mark.get())) posted_.pop_front();
    if (posted_.empty() || posted_.front().round > round) return {};
    return {RoundState::under_way, posted_.front().peer};
  }

  void abort() noexcept override {
    stop_.store(true);  // a post() that waits for NCCL ends
    try {
      end();
    } catch (const std::exception&) {
      // No thread can be made: the communicators stay, and rounds under way too.
    }
  }

 private:
  static bool is_well(int result) { return result == kNcclSuccess || result == kNcclInProgress; }

  void end() { abort_all(api_, take_comms()); }
  std::vector<NcclComm> take_comms() {
    const std::lock_guard lock(mutex_);
    if (stop_.load()) fail(-1);
    return std::exchange(comms_, {});
  }

  /// The first failure counts. \returns false
  bool fail(int peer) {
    if (!broken_.exchange(true)) broken_by_ = peer;
    return false;
  }
  bool ok(int result, int peer) { return result == kNcclSuccess || fail(peer); }
  bool enqueued(int result, int peer) { return is_well(result) || fail(peer); }

  int place_on(int rail, int peer) const {
    const std::vector<int>& ranks = spec_.rails[static_cast<size_t>(rail)].ranks;
    return static_cast<int>(std::find(ranks.begin(), ranks.end(), peer) - ranks.begin());
  }

  /// How a call of NCCL that gave `result` ends; kNcclInProgress: not until `until`, or until `stop` said so.
  template <class Stop>
  int settle(NcclComm comm, int result, Clock::time_point until, const Stop& stop) const {
    while (result == kNcclInProgress) {
      int state = kNcclSuccess;
      if (const int asked = api_.async_error(comm, &state); asked != kNcclSuccess) return asked;
      if (state != kNcclInProgress) return state;
      if (stop() || Clock::now() > until) return kNcclInProgress;
      std::this_thread::sleep_for(kLook);
    }
    return result;
  }

  void connect(const NcclRail& rail) {
    NcclComm comm = nullptr;
    NcclConfig config;
    const auto self = std::find(rail.ranks.begin(), rail.ranks.end(), spec_.rank) - rail.ranks.begin();
    int result = api_.init_rank(&comm, static_cast<int>(rail.ranks.size()), rail.id, static_cast<int>(self), &config);
    if (comm != nullptr) comms_.push_back(comm);
    if (comm != nullptr && result == kNcclInProgress)
      result = settle(comm, result, Clock::now() + spec_.deadline, spec_.interrupted);
    if (result == kNcclSuccess && comm != nullptr) return;
    std::string ranks;
    for (const int r : rail.ranks) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
    if (result == kNcclInProgress)
      throw Error(ErrorCode::rendezvous, "NCCL: the communicator of ranks " + ranks + " was not made within " +
                                             std::to_string(spec_.deadline.count()) + " ms, or the group was ended meanwhile");
    const char *const text = api_.error_text(result), *const last = comm ? api_.last_error(comm) : nullptr;
    throw Error(ErrorCode::system, "NCCL: the communicator of ranks " + ranks +
                                       " cannot be made: " + (text ? text : "result " + std::to_string(result)) +
                                       (last && *last ? std::string("; ") + last : "") + " (NCCL_DEBUG=WARN says more)");
  }

  const NcclApi& api_;
  const NcclCarrierSpec spec_;
  std::mutex mutex_;  ///< of what follows: abort() may come at any time
  std::vector<NcclComm> comms_;
  std::deque<Posted> posted_;
  int broken_by_ = -1;
  std::atomic<bool> broken_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace

std::unique_ptr<Carrier> make_nccl_carrier(const NcclApi& api, NcclCarrierSpec spec) {
  return std::make_unique<NcclCarrier>(api, std::move(spec));
}

}  // namespace switchyard::detail

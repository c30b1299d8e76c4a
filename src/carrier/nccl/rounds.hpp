// SPDX-License-Identifier: Apache-2.0
// Common base class of the carriers over NCCL communicators: rounds on a stream, marks after them, and the rank that broke
// them.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "carrier/carrier.hpp"
#include "carrier/nccl/comms.hpp"

namespace switchyard::detail {

class NcclRounds : public Carrier {
 public:
  void post(uint64_t round, std::span<const PeerTransfer> transfers, void* stream) final {
    const std::lock_guard lock(mutex_);
    if (broken_.load()) return;
    int num_transfers = 0, last_peer = -1;
    for (const PeerTransfer& transfer : transfers) {
      if (transfer.send.empty() && transfer.receive.empty()) continue;
      if (comms_->rail_to(transfer.peer) < 0) {
        fail(transfer.peer);
        return;
      }
      ++num_transfers;
      last_peer = transfer.peer;
    }
    if (num_transfers == 0) return;
    const int peer = num_transfers == 1 ? last_peer : -1;
    if (!enqueue(transfers, stream, peer)) return;
    const auto mark = comms_->spec().marks->mark(stream);
    if (mark) posted_.push_back({round, peer, mark});
    marked(mark);
  }

  RoundStatus advance(uint64_t round) final {
    const std::lock_guard lock(mutex_);
    for (const NcclComm comm : comms_->all()) {
      int error = kNcclSuccess;
      if (comms_->api().async_error(comm, &error) != kNcclSuccess || !is_healthy(error)) fail(-1);
    }
    if (broken_.load()) return {RoundState::broken, broken_by_};
    while (!posted_.empty() && comms_->spec().marks->reached(posted_.front().mark.get())) posted_.pop_front();
    if (posted_.empty() || posted_.front().round > round) return {};
    return {RoundState::in_progress, posted_.front().peer};
  }

  void abort() noexcept final {
    stop_.store(true);  // ends a post() that waits for NCCL
    const std::lock_guard lock(mutex_);
    fail(-1);
    end_elsewhere();
  }

 protected:
  explicit NcclRounds(std::unique_ptr<NcclComms> comms) : comms_(std::move(comms)) {}

  /// A round enqueued on the stream.
  struct Posted {
    uint64_t round;
    int peer;  ///< of its only leg, or -1
    std::shared_ptr<const void> mark;
  };

  // The functions below are called with mutex_ held, except from destructors, when no other thread uses the object.

  /// Enqueues a round that has bytes; `peer`: of its only leg, or -1. \returns true on success; otherwise fail() has been
  /// called
  virtual bool enqueue(std::span<const PeerTransfer> transfers, void* stream, int peer) = 0;
  /// Reports the mark placed after the enqueued work.
  virtual void marked(const std::shared_ptr<const void>&) {}
  /// Takes the communicators and ends them, along with rounds in flight, without blocking the caller.
  virtual void end_elsewhere() noexcept = 0;

  static bool is_healthy(int result) { return result == kNcclSuccess || result == kNcclInProgress; }
  /// Records only the first failure. \returns false
  bool fail(int peer) {
    if (!broken_.exchange(true)) broken_by_ = peer;
    return false;
  }
  bool has_failed() const { return broken_.load(); }
  /// True if waits for NCCL must end.
  bool is_stopped() const { return stop_.load(); }
  NcclComms& comms() const { return *comms_; }
  std::deque<Posted>& posted() { return posted_; }

 private:
  std::mutex mutex_;  ///< guards the members below: abort() may be called at any time
  const std::unique_ptr<NcclComms> comms_;
  std::deque<Posted> posted_;
  int broken_by_ = -1;
  std::atomic<bool> broken_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace switchyard::detail

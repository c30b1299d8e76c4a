// SPDX-License-Identifier: Apache-2.0
// Rounds between hosts for a rank on a GPU. They run in the order of the caller's streams, through NCCL calls or, if all ranks
// support it, through kernels (carrier/nccl). A thread watches them because a kernel waiting for the network cannot be ended in
// any other way.
//
// All objects of a group share the rounds because communicators take long to create and occupy memory. All ranks make the same
// calls in the same order, so their rounds are also posted in the same order; rounds of calls on different streams wait for
// each other in that order.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "carrier/carrier.hpp"
#include "carrier/nccl/comms.hpp"
#include "exchange/hosts/gin.hpp"
#include "exchange/hosts/round_watch.hpp"
#include "exchange/gpu/rank.hpp"

namespace switchyard::detail {

/// Rounds of one rank; called on the rank's thread. Destroyed with the group (Group::Impl).
class GpuRounds {
 public:
  /// Returns the rank's rounds. Collective, inside Group::Impl::collectively() with the GPU current. The first object of a
  /// group loads NCCL, creates the communicators and sends a first round. \throws on all ranks: Error(unsupported);
  /// Error(mismatch) if NCCL versions or values of SWITCHYARD_NCCL_GIN differ between ranks; the error of any rank that cannot
  /// create its communicators.
  static std::shared_ptr<GpuRounds> of(Group::Impl& group, CudaRank& gpu);
  /// Used by of().
  GpuRounds(Group::Impl& group, CudaRank& gpu);
  ~GpuRounds();
  GpuRounds(const GpuRounds&) = delete;
  GpuRounds& operator=(const GpuRounds&) = delete;

  /// Enqueues a round, like Carrier::post; later work on the stream follows it. If the round takes longer than `timeout` after
  /// the stream has reached it, or if the group fails in the meantime, the communicators are ended, and later kernels see the
  /// abort word.
  void post(std::span<const PeerTransfer> transfers, gpu::Stream stream, Operation operation, std::chrono::nanoseconds timeout);
  /// For an object whose calls are captured. Rounds are watched as long as a reference exists, which may outlive this object.
  /// \throws Error(unsupported) where rounds cannot be captured.
  class Replays;
  std::shared_ptr<Replays> watch_replays();
  static RoundWatch words_of(const Replays& replays);
  /// post() on a captured stream. The call's kernels before and after the round write the words of `replays`, which are the
  /// host's only information about replays. These rounds are ended as in post(), but after a slightly longer time.
  void post_captured(Replays& replays, std::span<const PeerTransfer> transfers, gpu::Stream stream, Operation operation,
                     std::chrono::nanoseconds timeout);
  /// Stream for rounds that run concurrently with the caller's stream. No other work is enqueued on it, and it is never
  /// captured.
  gpu::Stream stream() const { return first_stream_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    uint64_t round;
    Operation operation;
    std::chrono::nanoseconds timeout;
    int peer;  ///< one of the peers that take part in the round
    std::shared_ptr<const void> before;
    std::optional<Clock::time_point> since = {};  ///< when the stream reached the round
  };
  std::unique_ptr<Carrier> connect(Milliseconds deadline);
  NcclCarrierSpec spec_of(const std::vector<NcclId>& ids, Milliseconds budget);
  void send_first_round(Milliseconds deadline);
  /// Handles a round that NCCL failed to enqueue: later kernels must not run as if it had succeeded. Waits until the cause is
  /// known.
  void give_up(const Pending& round);
  void watch();
  /// One check by the watching thread.
  void poll_front();
  void handle_status(const Pending& front, const RoundStatus& status);
  void look_at_replays();
  void look_at_replay(Replays& replays);
  void record(const Pending& round, int peer, bool aborted, uint64_t waited_ns);
  void end();

  Group::Impl& group_;
  CudaRank& gpu_;
  const std::shared_ptr<StreamMarks> marks_;
  gpu::Stream first_stream_ = nullptr;
  std::shared_ptr<GpuGin> gin_;  ///< null: NCCL performs the rounds
  std::unique_ptr<Carrier> carrier_;
  uint64_t next_round_ = 1;
  std::atomic<bool> over_ = false;
  std::optional<Clock::time_point> broken_since_;  ///< used by the watching thread
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;                            // guarded by mutex_
  std::deque<Pending> pending_;                  // guarded by mutex_
  std::vector<std::weak_ptr<Replays>> replays_;  // guarded by mutex_
  std::thread watcher_;
};

}  // namespace switchyard::detail

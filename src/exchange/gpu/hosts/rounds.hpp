// SPDX-License-Identifier: Apache-2.0
// Rounds between hosts of a rank on a GPU: in the order of the caller's streams, by NCCL's calls or, where all ranks can have
// it, by kernels (carrier/nccl), and a thread that watches them, because nobody else can end a kernel that waits for the
// network.
//
// All objects of a group share them, because communicators take long to make and keep memory. All ranks make the same calls in
// the same order, so their rounds are posted in one order; rounds of calls on different streams wait for each other in it.
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
#include "exchange/gpu/hosts/gin.hpp"
#include "exchange/gpu/hosts/round_watch.hpp"
#include "exchange/gpu/rank.hpp"

namespace switchyard::detail {

/// Of one rank, whose thread makes the calls. Ends with the group (Group::Impl).
class GpuRounds {
 public:
  /// Those of the rank. Collective, in Group::Impl::collectively(), with the GPU current: the first object of a group looks
  /// NCCL up, makes the communicators and sends a first round. \throws on all ranks alike Error(unsupported), Error(mismatch)
  /// if ranks have NCCL of different versions or different values of SWITCHYARD_NCCL_GIN, and what a rank throws that cannot
  /// have its communicators.
  static std::shared_ptr<GpuRounds> of(Group::Impl& group, CudaRank& gpu);
  /// For of().
  GpuRounds(Group::Impl& group, CudaRank& gpu);
  ~GpuRounds();
  GpuRounds(const GpuRounds&) = delete;
  GpuRounds& operator=(const GpuRounds&) = delete;

  /// Enqueues a round, as Carrier::post; what is enqueued next comes after it. If it lasts longer than `timeout` from when the
  /// stream has come to it, or the group fails meanwhile, the communicators are ended: kernels behind it find the abort word.
  void post(std::span<const Leg> legs, gpu::Stream stream, Operation operation, std::chrono::nanoseconds timeout);
  /// For an object whose calls are captured. Rounds are watched while somebody holds it; it may outlive this. \throws
  /// Error(unsupported) where rounds cannot be captured.
  class Replays;
  std::shared_ptr<Replays> watch_replays();
  static RoundWatch words_of(const Replays& replays);
  /// post() on a stream that is captured. Kernels of the call before and behind the round write the words of `replays`, which
  /// is all that the host knows of replays: they are ended as above, within a moment more.
  void post_captured(Replays& replays, std::span<const Leg> legs, gpu::Stream stream, Operation operation,
                     std::chrono::nanoseconds timeout);
  /// A stream for rounds beside the caller's. Nothing else is enqueued on it, and it is never captured.
  gpu::Stream stream() const { return first_stream_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    uint64_t round;
    Operation operation;
    std::chrono::nanoseconds timeout;
    int peer;  ///< one of those that have a leg in it
    std::shared_ptr<const void> before;
    std::optional<Clock::time_point> since = {};  ///< when the stream had come to it
  };
  std::unique_ptr<Carrier> connect(Milliseconds deadline);
  NcclCarrierSpec spec_of(const std::vector<NcclId>& ids, Milliseconds budget);
  void send_first_round(Milliseconds deadline);
  /// A round that NCCL did not enqueue: kernels behind it must not run as if it had. Waits for whoever knows why.
  void give_up(const Pending& round);
  void watch();
  /// One look of the watching thread.
  void look();
  void look_at(const Pending& front, const RoundLook& look);
  void look_at_replays();
  void look_at_replay(Replays& replays);
  void record(const Pending& round, int peer, bool aborted, uint64_t waited_ns);
  void end();

  Group::Impl& group_;
  CudaRank& gpu_;
  const std::shared_ptr<StreamMarks> marks_;
  gpu::Stream first_stream_ = nullptr;
  std::shared_ptr<GpuGin> gin_;  ///< null: rounds are NCCL's
  std::unique_ptr<Carrier> carrier_;
  uint64_t next_round_ = 1;
  std::atomic<bool> over_ = false;
  std::optional<Clock::time_point> broken_since_;  ///< of the watching thread
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;                            // guarded by mutex_
  std::deque<Pending> pending_;                  // guarded by mutex_
  std::vector<std::weak_ptr<Replays>> replays_;  // guarded by mutex_
  std::thread watcher_;
};

}  // namespace switchyard::detail

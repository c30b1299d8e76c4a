// SPDX-License-Identifier: Apache-2.0
// One rank's communicators, created and ended without blocking: NCCL works in its own threads, and this thread polls its
// progress within a deadline.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "carrier/nccl/api.hpp"

namespace switchyard::detail {

/// Positions in stream order. Carriers' interface to the GPU runtime, on which this layer does not depend.
class StreamMarks {
 public:
  virtual ~StreamMarks() = default;
  /// Marks all work enqueued on `stream` so far. Returns null if the stream is being captured, because completion cannot be
  /// queried there; the carrier does not track such a round once it is enqueued.
  virtual std::shared_ptr<const void> mark(void* stream) = 0;
  /// True if all work that precedes the mark is done. Does not wait. Any thread.
  virtual bool reached(const void* mark) noexcept = 0;
  /// Orders later work on `stream` after all work that precedes the mark.
  virtual void order(void* stream, const void* mark) = 0;
};

struct NcclRail {
  std::vector<int> ranks;  ///< its members, in the order of their hosts
  NcclId id;               ///< made by one of them
};

struct NcclCarrierSpec {
  int rank = 0;
  std::vector<NcclRail> rails;  ///< rails this rank is on, in the same order on all ranks
  /// Rail whose communicator carries the legs to `peer`, as an index into `rails`; -1: none.
  std::function<int(int peer)> rail_to;
  std::chrono::milliseconds deadline{0};  ///< of making each communicator, and of posting a round
  /// Polled while the carrier waits for NCCL; returning true ends the wait.
  std::function<bool()> interrupted = [] { return false; };
  std::shared_ptr<StreamMarks> marks;
};

/// A rank has one communicator per rail; a rail has one rank on each host, so no communicator contains a GPU twice
/// (HostMap::rail_ranks). Use from one thread at a time.
class NcclComms {
 public:
  using Clock = std::chrono::steady_clock;

  /// Creates the communicators, with the rank's GPU current: collective over the ranks on each rail. First waits for threads of
  /// end_in_thread(), for at most 5 s or a quarter of the deadline, whichever is shorter. While NCCL frees memory on a GPU
  /// there, no thread in the process can enqueue work before that GPU is idle, and calls by ranks that share it would wait for
  /// each other. \throws Error(rendezvous) at the deadline or when interrupted, Error(system) with NCCL's error text. `api`
  /// outlives this.
  NcclComms(const NcclApi& api, NcclCarrierSpec spec);
  /// Ends the remaining communicators with end_elsewhere().
  ~NcclComms();
  NcclComms(const NcclComms&) = delete;
  NcclComms& operator=(const NcclComms&) = delete;

  const NcclApi& api() const { return api_; }
  const NcclCarrierSpec& spec() const { return spec_; }
  /// In rail order; empty after take().
  const std::vector<NcclComm>& all() const { return comms_; }
  std::vector<NcclComm> take();

  /// Rail that carries the legs to `peer`, or -1.
  int rail_to(int peer) const;
  /// A member's rank number in the communicator.
  int place_on(int rail, int rank) const;
  int own_place(int rail) const { return place_on(rail, spec_.rank); }

  /// Returns the final result of an NCCL call that returned `result`; kNcclInProgress if it did not finish by `until` or before
  /// `stop` returned true.
  template <class Stop>
  int settle(NcclComm comm, int result, Clock::time_point until, const Stop& stop) const {
    while (result == kNcclInProgress) {
      int state = kNcclSuccess;
      if (const int asked = api_.async_error(comm, &state); asked != kNcclSuccess) return asked;
      if (state != kNcclInProgress) return state;
      if (stop() || Clock::now() > until) return kNcclInProgress;
      std::this_thread::sleep_for(kPollInterval);
    }
    return result;
  }
  /// Calls settle() with the deadline of the spec; unless it succeeds, throws with the text "NCCL: <what of> ranks ...
  /// <failed>".
  void require(int rail, int result, const char* what, const char* failed) const;
  /// Flushes a communicator that was taken. \returns true if it is destroyed
  bool finish(NcclComm comm, Clock::time_point until) const;

 private:
  static constexpr std::chrono::microseconds kPollInterval{50};
  void connect(int rail);

  const NcclApi& api_;
  const NcclCarrierSpec spec_;
  std::vector<NcclComm> comms_;
};

/// Runs `end`, which ends communicators and does not throw, in a separate thread. \throws std::exception if no thread can be
/// created.
void end_in_thread(std::function<void()> end);
/// Ends communicators in a separate thread, because NCCL may wait for the GPU. If no thread can be created, they are leaked.
void end_elsewhere(const NcclApi& api, std::vector<NcclComm> comms) noexcept;

}  // namespace switchyard::detail

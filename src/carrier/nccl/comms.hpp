// SPDX-License-Identifier: Apache-2.0
// The communicators of one rank, made and ended without blocking: NCCL works in threads of its own, and this thread asks how
// far it is, within a deadline.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "carrier/nccl/api.hpp"

namespace switchyard::detail {

/// Places in the order of a stream. What a carrier asks of the GPU's runtime, which this layer does not know.
class StreamMarks {
 public:
  virtual ~StreamMarks() = default;
  /// What has been enqueued on `stream` until now. Null: it is captured, and nobody can ask; a round there is no longer the
  /// carrier's business once it is enqueued.
  virtual std::shared_ptr<const void> mark(void* stream) = 0;
  /// Whether all of that is done. Does not wait. Any thread.
  virtual bool reached(const void* mark) noexcept = 0;
  /// What is enqueued on `stream` from now on comes behind all of that.
  virtual void order(void* stream, const void* mark) = 0;
};

struct NcclRail {
  std::vector<int> ranks;  ///< its members, in the order of their hosts
  NcclId id;               ///< drawn by one of them
};

struct NcclCarrierSpec {
  int rank = 0;
  std::vector<NcclRail> rails;  ///< those that have this rank, in an order that all ranks keep
  /// The rail whose communicator has the legs to `peer`; an index of `rails`, or -1: none.
  std::function<int(int peer)> rail_to;
  std::chrono::milliseconds deadline{0};  ///< of making each communicator, and of posting a round
  /// Asked while the carrier waits for NCCL: true ends that.
  std::function<bool()> interrupted = [] { return false; };
  std::shared_ptr<StreamMarks> marks;
};

/// A rank has a communicator for each rail that it is on; a rail has one rank of each host, so no communicator has a GPU twice
/// (HostMap::rail_ranks). One thread at a time.
class NcclComms {
 public:
  using Clock = std::chrono::steady_clock;

  /// Makes them, with the rank's GPU current: collective over the ranks of each rail. Waits for threads of end_in_thread()
  /// first, up to a quarter of the deadline and 5 s: while NCCL frees memory of a GPU there, no thread of the process can
  /// enqueue anything before that GPU has come to rest, and calls of ranks that share it would wait for each other. \throws
  /// Error(rendezvous) at the deadline or when it was interrupted, Error(system) with NCCL's own words. `api` outlives this.
  NcclComms(const NcclApi& api, NcclCarrierSpec spec);
  /// Ends those that are left, as end_elsewhere().
  ~NcclComms();
  NcclComms(const NcclComms&) = delete;
  NcclComms& operator=(const NcclComms&) = delete;

  const NcclApi& api() const { return api_; }
  const NcclCarrierSpec& spec() const { return spec_; }
  /// In the order of the rails; none once they have been taken.
  const std::vector<NcclComm>& all() const { return comms_; }
  std::vector<NcclComm> take();

  /// The rail of the legs to `peer`, or -1.
  int rail_to(int peer) const;
  /// Of a member: its number in the communicator.
  int place_on(int rail, int rank) const;
  int own_place(int rail) const { return place_on(rail, spec_.rank); }

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
  /// The same within the deadline of the spec; throws, with "NCCL: <what of> ranks ... <failed>", unless it succeeds.
  void require(int rail, int result, const char* what, const char* failed) const;
  /// Flushes a communicator that was taken. \returns whether it is gone
  bool finish(NcclComm comm, Clock::time_point until) const;

 private:
  static constexpr std::chrono::microseconds kLook{50};
  void connect(int rail);

  const NcclApi& api_;
  const NcclCarrierSpec spec_;
  std::vector<NcclComm> comms_;
};

/// Runs `end`, which ends communicators and throws nothing, in a thread of its own. \throws std::exception if there can be
/// none.
void end_in_thread(std::function<void()> end);
/// Ends communicators in a thread of its own, because NCCL may wait for the GPU. Where no thread can be made they stay.
void end_elsewhere(const NcclApi& api, std::vector<NcclComm> comms) noexcept;

}  // namespace switchyard::detail

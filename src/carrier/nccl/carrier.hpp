// SPDX-License-Identifier: Apache-2.0
// NCCL as a carrier, for ranks on GPUs: legs of a round are sends and receives of one NCCL group on the caller's stream.
//
// A rank has a communicator for each rail that it is on; a rail has one rank of each host, so no communicator has a GPU twice
// (HostMap::rail_ranks). All is done without blocking: NCCL works in threads of its own, and this thread asks how far it is,
// within a deadline.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "carrier/carrier.hpp"
#include "carrier/nccl/api.hpp"

namespace switchyard::detail {

/// Places in the order of a stream. What the carrier asks of the GPU's runtime, which this layer does not know.
class StreamMarks {
 public:
  virtual ~StreamMarks() = default;
  /// What has been enqueued on `stream` until now.
  virtual std::shared_ptr<const void> mark(void* stream) = 0;
  /// Whether all of that is done. Does not wait.
  virtual bool reached(const void* mark) noexcept = 0;
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

/// Makes the communicators, with the rank's GPU current: collective over the ranks of each rail. \throws
/// Error(rendezvous) at the deadline or when it was interrupted, Error(system) with NCCL's own words.
///
/// post() returns when NCCL has enqueued the round on the stream, so that what is enqueued next comes after it; it waits for
/// that alone, and not for the round. With `broken` from advance() from then on if NCCL refuses, or does not come to an end
/// within the deadline. advance() cannot say for whom a round waits unless it has one leg, and never says `unlike`: ends that
/// post other sizes are found by what ranks tell of their calls, or at the deadline.
///
/// abort() lets NCCL end the communicators in a thread of its own, whatever that waits for: kernels of rounds under way end
/// without having done their work, so whoever aborts has told the kernels behind them before. A communicator that does not end
/// is left behind, and so is one that has not flushed a second after the carrier's end.
std::unique_ptr<Carrier> make_nccl_carrier(const NcclApi& api, NcclCarrierSpec spec);

}  // namespace switchyard::detail

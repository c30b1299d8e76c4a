// SPDX-License-Identifier: Apache-2.0
// Transports bytes between ranks on different hosts. The data's meaning is defined by the protocols: a carrier has no notion of
// flags, counts or formats, and it never waits. Deadlines, abort words and wait times are handled by the code that waits for
// the round.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace switchyard::detail {

/// Data sent to and received from one peer in a round. Both ends post it with matching sizes; an empty span means no data in
/// that direction.
struct PeerTransfer {
  int peer = -1;  ///< a rank
  std::span<const std::byte> send;
  std::span<std::byte> receive;
};

enum class RoundState : uint8_t {
  in_progress,
  done,    ///< all bytes of the round, and of those before it, have been sent and received
  broken,  ///< a peer has closed its end or is unreachable, or abort() was called
  unlike,  ///< a peer sends other data than expected: the ends make different calls
};
struct RoundStatus {
  RoundState state = RoundState::done;
  int peer = -1;  ///< rank that the round waits for, or that broke it; -1: none
};

/// One rank's connections to its peers. A rank numbers its rounds in ascending order; both ends post the transfers between two
/// ranks in the same order. Use from one thread at a time, except for abort().
class Carrier {
 public:
  virtual ~Carrier() = default;
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  /// Shares ownership of the memory that contains all spans of all rounds. Call before the first round. A network may still
  /// access posted memory after the carrier is destroyed if a round was in flight; the carrier's share is then kept until the
  /// network has finished.
  virtual void share(std::shared_ptr<const void> memory) { memory_ = std::move(memory); }
  /// Starts a round, with at most one leg per peer. The spans' memory must stay valid until the round is done; if the round
  /// might never complete, the memory must be shared. `stream` is the stream that orders the round (CUDA), or null (CPU).
  virtual void post(uint64_t round, std::span<const PeerTransfer> transfers, void* stream) = 0;
  /// Makes progress on all rounds and returns the state of `round`. Never waits.
  virtual RoundStatus advance(uint64_t round) = 0;
  /// Ends all rounds locally: advance() returns `broken` from now on. May be called from any thread at any time. Peers may
  /// observe this (sockets) or not (MPI), so the caller notifies them through the group.
  virtual void abort() noexcept = 0;

 protected:
  Carrier() = default;
  const std::shared_ptr<const void>& memory() const { return memory_; }

 private:
  std::shared_ptr<const void> memory_;
};

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Transport of bytes between ranks on different hosts. The protocols define their meaning: a carrier has no notion of flags,
// counts or formats, and it never waits. Deadlines, abort words and wait times are handled by the code that waits for a round.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace switchyard::detail {

/// Data sent to and received from one peer in a round. Both ends post it with the same sizes; an empty span means no data in
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

/// One rank's connections to its peers. The rank numbers its rounds in ascending order; the transfers between two ranks are
/// posted in the same order at both. One thread at a time, except abort().
class Carrier {
 public:
  virtual ~Carrier() = default;
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  /// Shares ownership of the memory that contains all spans of all rounds; call before the first round. A network may access
  /// posted memory after the carrier is destroyed if a round was in flight then: such a carrier keeps its share until the
  /// network is done.
  void share(std::shared_ptr<const void> memory) { memory_ = std::move(memory); }
  /// Starts a round, with at most one leg per peer. The memory of the spans must stay valid until the round is done; if the
  /// round never completes, it must be shared. `stream`: CUDA: the stream that orders the round; CPU: null.
  virtual void post(uint64_t round, std::span<const PeerTransfer> transfers, void* stream) = 0;
  /// Makes progress on all rounds and returns the state of `round`. Never waits.
  virtual RoundStatus advance(uint64_t round) = 0;
  /// Ends all rounds locally: advance() returns `broken` from now on. Any thread, at any time. Peers may observe it (sockets)
  /// or not (MPI): the caller notifies them through the group.
  virtual void abort() noexcept = 0;

 protected:
  Carrier() = default;
  const std::shared_ptr<const void>& memory() const { return memory_; }

 private:
  std::shared_ptr<const void> memory_;
};

}  // namespace switchyard::detail

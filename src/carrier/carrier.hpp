// SPDX-License-Identifier: Apache-2.0
// The way of bytes between ranks of different hosts. What they mean is the protocols': a carrier knows of no flag, count or
// format, and it never waits. Deadlines, abort words and waiting times belong to whoever waits for a round.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace switchyard::detail {

/// What goes to and comes from one peer in a round. Both ends post it with the same sizes; an empty span: nothing goes, or
/// comes.
struct Leg {
  int peer = -1;  ///< a rank
  std::span<const std::byte> send;
  std::span<std::byte> receive;
};

enum class RoundState : uint8_t {
  under_way,
  done,    ///< all bytes of the round, and of those before it, have gone and come
  broken,  ///< a peer has closed its end or is out of reach, or abort() was called
  unlike,  ///< a peer sends other bytes than are awaited: the ends make different calls
};
struct RoundLook {
  RoundState state = RoundState::done;
  int peer = -1;  ///< whom the round waits for, or who broke it; -1: nobody
};

/// One rank's way to its peers. Rounds are numbered by the rank, each number greater than the one before; the legs of two ranks
/// to each other come in the same order at both. One thread at a time, but for abort().
class Carrier {
 public:
  virtual ~Carrier() = default;
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  /// Shares the memory in which all spans of all rounds will lie, before the first round. A network may read and write what was
  /// posted after the carrier has ended, if a round was under way then: such a carrier keeps its share until the network is
  /// done.
  void share(std::shared_ptr<const void> memory) { memory_ = std::move(memory); }
  /// Begins a round, with at most one leg to each peer. The memory of the spans must stay until the round is done; of a round
  /// that never is, it must be shared. `stream`: CUDA: whose order the round follows; CPU: null.
  virtual void post(uint64_t round, std::span<const Leg> legs, void* stream) = 0;
  /// Moves on what can move now, of all rounds, and says how `round` stands. Never waits.
  virtual RoundLook advance(uint64_t round) = 0;
  /// Ends all rounds here: advance() says `broken` from now on. From any thread, at any time. Peers may hear of it (sockets) or
  /// not (MPI): whoever aborts tells them by the group.
  virtual void abort() noexcept = 0;

 protected:
  Carrier() = default;
  const std::shared_ptr<const void>& memory() const { return memory_; }

 private:
  std::shared_ptr<const void> memory_;
};

}  // namespace switchyard::detail

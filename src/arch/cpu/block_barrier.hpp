// SPDX-License-Identifier: Apache-2.0
// Barrier for the warps of one block. It is reusable and orders everything before it in each warp before everything after it in
// all warps.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>

#include "arch/cpu/polite_wait.hpp"

namespace switchyard::detail {

/// Thrown by block_sync if another warp of the block exited with an exception, in which case the barrier can never complete.
class BlockBroken : public std::runtime_error {
 public:
  BlockBroken() : std::runtime_error("block_sync: another warp of this block ended with an exception") {}
};

/// A warp that returns from its body leaves the barrier; the other warps no longer wait for it, as on a GPU.
class BlockBarrier {
 public:
  /// Restores all `num_warps` warps as members. Must not be called while any warp is in the barrier.
  void reset(int num_warps) {
    state_.store(pack(0, static_cast<uint32_t>(num_warps), 0), std::memory_order_relaxed);
    broken_.store(false, std::memory_order_relaxed);
  }

  /// Waits until all members have arrived. Throws BlockBroken.
  void arrive_and_wait() {
    const uint64_t generation = generation_of(arrive(0));
    for (int polls = 0; generation_of(state_.load(std::memory_order_acquire)) == generation; ++polls) {
      if (broken_.load(std::memory_order_acquire) && generation_of(state_.load(std::memory_order_acquire)) == generation) {
        throw BlockBroken();
      }
      polite_wait(polls);
    }
  }

  /// Removes the caller from the set of members.
  void arrive_and_leave() { arrive(1); }

  /// Call when the caller exits with an exception: every current and later arrive_and_wait() throws, unless its generation is
  /// already complete.
  void break_off() { broken_.store(true, std::memory_order_release); }

 private:
  // {generation: 32, members: 16, arrived: 16}
  static constexpr uint64_t pack(uint64_t generation, uint32_t members, uint32_t arrived) {
    return (generation << 32) | (uint64_t{members} << 16) | arrived;
  }
  static constexpr uint64_t generation_of(uint64_t state) { return state >> 32; }

  /// Performs one arrival that also removes `leaving` members, and completes the generation if it is the last. Returns the
  /// previous state.
  uint64_t arrive(uint32_t leaving) {
    uint64_t before = state_.load(std::memory_order_relaxed);
    uint64_t after;
    do {
      const auto members = static_cast<uint32_t>((before >> 16) & 0xFFFFu) - leaving;
      const auto arrived = static_cast<uint32_t>(before & 0xFFFFu) + (1 - leaving);
      const bool complete = arrived == members;
      after = pack((generation_of(before) + (complete ? 1 : 0)) & 0xFFFFFFFFu, members, complete ? 0 : arrived);
    } while (!state_.compare_exchange_weak(before, after, std::memory_order_acq_rel, std::memory_order_relaxed));
    return before;
  }

  alignas(64) std::atomic<uint64_t> state_{0};
  std::atomic<bool> broken_{false};
};

}  // namespace switchyard::detail

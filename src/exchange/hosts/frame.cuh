// SPDX-License-Identifier: Apache-2.0
// Prologue of the kernels between rounds.
#pragma once

#include "exchange/gpu/frame.cuh"
#include "exchange/hosts/round_watch.hpp"

namespace switchyard::detail {

/// Returns the abort word if the group has failed, or 0. Call from one thread of a kernel that performs or follows a round.
/// Also reads the host's abort word, which is set before a round in flight is ended; the contents of that round are then
/// invalid.
__device__ inline uint64_t load_abort_words(const CallContext& call) {
  const uint64_t abort = ptx::load_acquire<Scope::system>(call.abort_word);
  if (abort != 0 || call.host_abort_word == nullptr) return abort;
  return ptx::load_acquire<Scope::system>(call.host_abort_word);
}

/// load_call_words() for a kernel after a round.
__device__ inline CallWords load_hosts_call_words(const CallContext& args, const EpochState* state) {
  CallWords words;
  if (threadIdx.x != 0) return words;
  words.abort = load_abort_words(args);
  words.epoch = ptx::load_relaxed<Scope::device>(&state->epoch);
  return words;
}

/// Writes a word of RoundWatch. Call from one warp.
__device__ inline void publish_round(uint64_t* word, const CallContext& call) {
  if (word == nullptr || threadIdx.x % kLanes != 0) return;
  ptx::store_release<Scope::system>(word, call.epoch << kRoundOperationBits | static_cast<uint64_t>(call.operation));
}

}  // namespace switchyard::detail

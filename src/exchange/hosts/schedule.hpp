// SPDX-License-Identifier: Apache-2.0
// The order of a call's phases and rounds, for every mode and backend.
#pragma once

#include <cstdint>

#include "protocol/hosts/message.hpp"

namespace switchyard::detail {

/// Runs `rounds` rounds with kRoundSlots in flight: send(k) packs and posts round k, take(k) waits for it and processes what
/// arrived. between() runs once the first rounds have been posted. Every function returns false if the call has failed, which
/// ends the sequence. \returns whether all succeeded
template <class Send, class Between, class Take>
bool run_rounds(int64_t rounds, Send&& send, Between&& between, Take&& take) {
  for (int64_t k = 0; k < rounds && k < kRoundSlots; ++k)
    if (!send(k)) return false;
  if (!between()) return false;
  for (int64_t k = 0; k < rounds; ++k) {
    if (!take(k)) return false;
    if (k + kRoundSlots < rounds && !send(k + kRoundSlots)) return false;
  }
  return true;
}

}  // namespace switchyard::detail

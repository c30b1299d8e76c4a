// SPDX-License-Identifier: Apache-2.0
// Signatures of calls, which ranks compare: equal on all ranks that make the same call. Host and device.
#pragma once

#include <cstdint>

#include "base/mix_hash.hpp"

namespace switchyard::detail {

/// {hash of everything that must be equal:40, options:24}. The options, packed as in exchange/group/call_difference.hpp, name
/// what differs; they are also part of the hash, because some values do not fit.
inline constexpr int kSignatureOptionBits = 24;

SWITCHYARD_FN constexpr uint64_t make_signature(uint64_t hash, uint64_t options) {
  constexpr uint64_t kOptions = (uint64_t{1} << kSignatureOptionBits) - 1;
  return (hash & ~kOptions) | (options & kOptions);
}

/// Adds a value that is not an option.
SWITCHYARD_FN constexpr uint64_t mix_signature(uint64_t signature, uint64_t value) {
  return make_signature(mix_hash(signature, value), signature);
}

}  // namespace switchyard::detail

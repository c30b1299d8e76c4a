// SPDX-License-Identifier: Apache-2.0
// Call signatures. Ranks compare them to detect different calls; all ranks that make the same call compute equal signatures.
// Host and device code.
#pragma once

#include <cstdint>

#include "base/mix_hash.hpp"

namespace switchyard::detail {

/// {hash of all values that must be equal:40, options:24}. The options, packed by exchange/group/call_difference.hpp, identify
/// the difference; the hash includes them too, because some values do not fit.
inline constexpr int kSignatureOptionBits = 24;

SWITCHYARD_FN constexpr uint64_t make_signature(uint64_t hash, uint64_t options) {
  constexpr uint64_t kOptions = (uint64_t{1} << kSignatureOptionBits) - 1;
  return (hash & ~kOptions) | (options & kOptions);
}

/// Adds a value that is not an option.
SWITCHYARD_FN constexpr uint64_t mix_signature(uint64_t signature, uint64_t value) {
  return make_signature(mix_hash(signature, value), signature);
}

/// The version in the table of selector `number` of a group. The low bits differ between consecutive maps of a selector, and
/// between maps of equal version of up to eight selectors and route counters created one after the other.
constexpr uint32_t table_version(int64_t version, int64_t number) { return static_cast<uint32_t>(version + 3 * number); }
/// Number of low bits of table_version() that ranks compare in a call with a selector, and their position in the options of a
/// signature, after the number of the operation and a bit for the selector.
inline constexpr int kMapVersionBits = 3, kMapVersionAt = 3;
SWITCHYARD_FN constexpr uint32_t compared_version(uint32_t version) { return version & ((1u << kMapVersionBits) - 1); }
/// \pre the version in `signature` is 0
SWITCHYARD_FN constexpr uint64_t with_map_version(uint64_t signature, uint32_t version) {
  return signature | uint64_t{compared_version(version)} << kMapVersionAt;
}

}  // namespace switchyard::detail

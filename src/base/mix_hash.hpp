// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/macros.hpp"

namespace switchyard::detail {

/// Combines `hash` and `value` into a single hash. Host and device.
SWITCHYARD_FN constexpr uint64_t mix_hash(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdu;
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Positions and counts of a plan: 64 bits internally, 32 bits in public tables.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "base/index.hpp"  // IWYU pragma: export
#include "switchyard/status.hpp"

namespace switchyard::detail {

/// Converts `value` to an element of `table`; throws Error(unsupported) with the table's name if it does not fit.
inline int32_t narrow(int64_t value, const char* table) {
  if (value > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::unsupported,
                std::string(table) + " is " + std::to_string(value) + "; its int32 elements allow at most 2147483647");
  }
  return static_cast<int32_t>(value);
}

}  // namespace switchyard::detail

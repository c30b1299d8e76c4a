// SPDX-License-Identifier: Apache-2.0
// Number of blocks of a call on a GPU, for all modes. Independent of the device.
#pragma once

#include <algorithm>

namespace switchyard::detail {

/// Number of blocks for a call: as requested by the caller, else tuned, else `default_value` (each 0 if not given), limited to
/// the rank's maximum.
inline int blocks_of_call(int asked, int tuned, int default_value, int max) {
  return asked > 0 ? asked : std::min(tuned > 0 ? tuned : default_value, max);
}

}  // namespace switchyard::detail

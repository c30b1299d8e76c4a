// SPDX-License-Identifier: Apache-2.0
// How many blocks a call on a GPU has, for all modes. Knows no device.
#pragma once

#include <algorithm>

namespace switchyard::detail {

/// Blocks of a call: those its caller asks for, else the tuned ones, else `usual` (each 0 for none), at most those that a rank
/// may have.
inline int blocks_of_call(int asked, int tuned, int usual, int most) {
  return asked > 0 ? asked : std::min(tuned > 0 ? tuned : usual, most);
}

}  // namespace switchyard::detail

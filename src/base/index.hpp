// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace switchyard::detail {

/// Converts a signed position, which must not be negative, to a container subscript.
inline size_t idx(int64_t i) { return static_cast<size_t>(i); }

}  // namespace switchyard::detail

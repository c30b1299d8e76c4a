// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace switchyard::tool {

/// Converts a signed, non-negative position into a container subscript.
inline size_t at(int64_t i) { return static_cast<size_t>(i); }

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace switchyard::tool {

/// A subscript of a container from a signed position, which must not be negative.
inline size_t at(int64_t i) { return static_cast<size_t>(i); }

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// Exception boundary for local calls in any library: every exported C function that is not collective runs its body in
// `guarded`. The functions are inline, because the libraries share only internal_exports.hpp.
#pragma once

#include <cstdint>
#include <string>

#include "capi/internal_exports.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

/// Misuse detected by the C layer before the C++ API is called. In a collective call, the peers must still be notified.
class ArgumentError : public Error {
 public:
  explicit ArgumentError(const std::string& what) : Error(ErrorCode::invalid_argument, what) {}
};

/// Throws ArgumentError if `pointer` is null.
inline void require(const void* pointer, const char* name) {
  if (!pointer) throw ArgumentError(std::string(name) + " is NULL");
}

/// Throws ArgumentError unless value is in [low, high].
inline void require_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw ArgumentError(std::string(name) + " = " + std::to_string(value) + ": must be in [" + std::to_string(low) + ", " +
                        std::to_string(high) + "]");
}

/// Runs the body of a local call.
template <class Body>
sy_code guarded(Body&& body) noexcept {
  try {
    body();
    return SY_OK;
  } catch (...) {
    return sy_internal_keep_exception_1();
  }
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// The border that no exception crosses: every exported function runs its body in `guarded` or `collective`.
#pragma once

#include <cstdint>
#include <string>

#include "switchyard/c/switchyard.h"
#include "switchyard/group.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

/// Misuse that the C layer finds itself, before the C++ API sees the call. In a collective call the peers must still be told.
class ArgumentError : public Error {
 public:
  explicit ArgumentError(const std::string& what) : Error(ErrorCode::invalid_argument, what) {}
};

/// Inside a catch block: keeps text and details of the current exception for this thread and returns its code. Allocates
/// nothing.
switchyard_code_t record_current_exception() noexcept;

/// Throws ArgumentError unless `pointer` is set.
void require(const void* pointer, const char* name);
/// Throws ArgumentError unless value is in [low, high].
void require_range(const char* name, int64_t value, int64_t low, int64_t high);

/// Runs the body of a local call.
template <class Body>
switchyard_code_t guarded(Body&& body) noexcept {
  try {
    body();
    return SWITCHYARD_OK;
  } catch (...) {
    return record_current_exception();
  }
}

/// Runs the body of a collective call. The C++ API ends the peers' calls for every Error it throws that needs it; the rest is
/// here.
template <class Body>
switchyard_code_t collective(Group& group, Body&& body) noexcept {
  try {
    body();
    return SWITCHYARD_OK;
  } catch (const ArgumentError&) {
    group.abort(SWITCHYARD_INVALID_ARGUMENT);
    return record_current_exception();
  } catch (const Error&) {
    return record_current_exception();
  } catch (...) {
    group.abort(SWITCHYARD_SYSTEM);
    return record_current_exception();
  }
}

}  // namespace switchyard::detail

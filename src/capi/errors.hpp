// SPDX-License-Identifier: Apache-2.0
// Exception boundary for group calls: every exported function runs its body in `guarded` or `collective`.
#pragma once

#include "capi/guarded.hpp"
#include "switchyard/c/switchyard.h"
#include "switchyard/group.hpp"

namespace switchyard::detail {

/// Runs the body of a collective call. The C++ API ends the peers' calls for those of its own Errors that require it; this
/// function does so for all other errors.
template <class Body>
sy_code collective(Group& group, Body&& body) noexcept {
  try {
    body();
    return SY_OK;
  } catch (const ArgumentError&) {
    group.abort(SY_INVALID_ARGUMENT);
    return sy_internal_keep_exception_1();
  } catch (const Error&) {
    return sy_internal_keep_exception_1();
  } catch (...) {
    group.abort(SY_SYSTEM);
    return sy_internal_keep_exception_1();
  }
}

}  // namespace switchyard::detail

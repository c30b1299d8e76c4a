// SPDX-License-Identifier: Apache-2.0
// What libswitchyard exports for the C functions of libraries that stand on it, and for nobody else: no header that is
// installed declares it. docs/design/0045-c-of-the-layer.md.
#pragma once

#include "switchyard/c/types.h"

extern "C" {

/// Inside a catch block: keeps text and details of the exception that is being handled, for sy_last_error() and its like on
/// this thread, and returns its code. Allocates nothing. The number is the function's version: what this one does never
/// changes; what has to do something else gets another number, so that a library of another version is told by the loader.
switchyard_code_t sy_internal_keep_exception_1(void) noexcept;
}

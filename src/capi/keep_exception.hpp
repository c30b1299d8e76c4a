// SPDX-License-Identifier: Apache-2.0
// Declares a function that libswitchyard exports only for the C functions of libraries built on it; no installed header
// declares it. See docs/design/0045-c-of-the-layer.md.
#pragma once

#include "switchyard/c/types.h"

extern "C" {

/// Call in a catch block: stores the text and details of the current exception for sy_last_error() and related functions on
/// this thread, and returns its code. Allocates nothing. The number is the function's version: its behavior never changes. A
/// function with different behavior gets a different number, so that the loader detects a library of another version.
sy_code sy_internal_keep_exception_1(void) noexcept;
}

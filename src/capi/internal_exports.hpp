// SPDX-License-Identifier: Apache-2.0
// Functions that libswitchyard exports only for the C functions of libraries built on it; no installed header declares them.
// See docs/design/0045-c-of-the-layer.md. The number in a name is the function's version: its behavior never changes. A
// function with different behavior gets a different number, so that the loader detects a library of another version.
#pragma once

#include <memory>

#include "switchyard/c/types.h"

// As in switchyard/c/switchyard.h, which guarded.hpp does not need as a whole.
typedef struct sy_group sy_group;                  // NOLINT(readability-identifier-naming): a name of the C ABI
typedef struct sy_slot_selector sy_slot_selector;  // NOLINT(readability-identifier-naming): a name of the C ABI
namespace switchyard {
class Group;
class SlotSelector;
}  // namespace switchyard

extern "C" {

/// Call in a catch block: stores the text and details of the current exception for sy_last_error() and related functions on
/// this thread, and returns its code. Allocates nothing.
sy_code sy_internal_keep_exception_1(void) noexcept;

/// Returns a share of the group behind `group`, as held by every object created from a group. `group` is not NULL.
void sy_internal_share_group_1(const sy_group* group, std::shared_ptr<switchyard::Group>* share) noexcept;

/// The object behind `selector`; null if it is NULL.
switchyard::SlotSelector* sy_internal_slot_selector_1(sy_slot_selector* selector) noexcept;
}

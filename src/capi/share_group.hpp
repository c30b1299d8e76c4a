// SPDX-License-Identifier: Apache-2.0
// The second function that libswitchyard exports only for the C functions of libraries built on it; see keep_exception.hpp.
#pragma once

#include <memory>

#include "switchyard/c/switchyard.h"
#include "switchyard/group.hpp"

extern "C" {

/// Returns a share of the group behind `group`, as held by every object created from a group. `group` is not NULL. The number
/// is the function's version.
void sy_internal_share_group_1(const sy_group* group, std::shared_ptr<switchyard::Group>* share) noexcept;
}

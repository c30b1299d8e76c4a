// SPDX-License-Identifier: Apache-2.0
// The second function that libswitchyard exports for the C functions of libraries that stand on it, and for nobody else: see
// keep_exception.hpp.
#pragma once

#include <memory>

#include "switchyard/c/switchyard.h"
#include "switchyard/group.hpp"

extern "C" {

/// Gives a share of the group that `group` stands for, as everything holds that is made from a group. `group` is not NULL. The
/// number is the function's version.
void sy_internal_share_group_1(const sy_group* group, std::shared_ptr<switchyard::Group>* share) noexcept;
}

// SPDX-License-Identifier: Apache-2.0
// The table of the tool's verbs.
#pragma once

#include <span>

#include "cli/verb.hpp"

namespace switchyard::tool {

/// The verbs in the order in which --help lists them.
std::span<const Verb* const> all_verbs();

}  // namespace switchyard::tool

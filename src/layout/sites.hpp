// SPDX-License-Identifier: Apache-2.0
// The flags of all protocols; sites.def lists their names.
#pragma once

#include <cstdint>

#include "arch/ops.hpp"

namespace switchyard::detail {

enum class Site : uint8_t {
#define SWITCHYARD_SITE(name) name,
#include "layout/sites.def"
};

// NOLINTBEGIN(bugprone-macro-parentheses): terms of a sum
inline constexpr int kNumSites = 0
#define SWITCHYARD_SITE(name) +1
#include "layout/sites.def"
    ;
static_assert(kNumSites <= kMaxSites && Site::returned == kSentinelSite);

/// Number of flags in the control region; they come first.
inline constexpr int kNumControlSites = 0
#define SWITCHYARD_SITE(name)
#define SWITCHYARD_CONTROL_SITE(name) +1
#include "layout/sites.def"
    ;
// NOLINTEND(bugprone-macro-parentheses)
SWITCHYARD_FN constexpr int control_row(Site site) { return static_cast<int>(site) - static_cast<int>(Site::counts); }

SWITCHYARD_FN constexpr const char* site_name(Site site) {
#define SWITCHYARD_SITE(name) \
  if (site == Site::name) return #name;
#include "layout/sites.def"
  return "?";
}

}  // namespace switchyard::detail

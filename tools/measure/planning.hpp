// SPDX-License-Identifier: Apache-2.0
// How long a rank plans a dispatch on the CPU: the library's own planning functions, without a group and without rows.
#pragma once

#include "measure/machine.hpp"

namespace switchyard::measure {

struct PlanningTimes {
  double route_ns = 0;   ///< sender: one route of a token with eight
  double record_ns = 0;  ///< sender and receiver: one record of eight routes, written and taken
};

/// On one pinned thread, for about so long.
PlanningTimes measure_planning(const Machine& machine, double seconds);

}  // namespace switchyard::measure

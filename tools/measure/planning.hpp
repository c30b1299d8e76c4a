// SPDX-License-Identifier: Apache-2.0
// How long a rank plans a dispatch on the CPU: the library's own planning functions, without a group and without rows.
#pragma once

#include "measure/machine.hpp"

namespace switchyard::measure {

/// Nanoseconds. A record says of each of its token's K routes where it went.
struct PlanningTimes {
  double route_ns = 0;         ///< sender: planning a route
  double record_write_ns = 0;  ///< sender: writing one of the K entries of a record, to memory that no cache holds
  double record_read_ns = 0;   ///< receiver: taking one of them
};

/// On one pinned thread, for about so long.
PlanningTimes measure_planning(const Machine& machine, double seconds);

}  // namespace switchyard::measure

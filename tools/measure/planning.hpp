// SPDX-License-Identifier: Apache-2.0
// Time that a rank takes to plan a dispatch on the CPU with the library's own planning functions, without a group and without
// rows.
#pragma once

#include "measure/machine.hpp"

namespace switchyard::measure {

/// Nanoseconds. A record contains the destinations of its token's K routes.
struct PlanningTimes {
  double route_ns = 0;         ///< sender: planning a route
  double record_write_ns = 0;  ///< sender: writing one of the K entries of a record to memory that is not in any cache
  double record_read_ns = 0;   ///< receiver: reading one entry of a record
};

/// Measures on one pinned thread for about `seconds`.
PlanningTimes measure_planning(const Machine& machine, double seconds);

}  // namespace switchyard::measure

// SPDX-License-Identifier: Apache-2.0
// What each rank has to do in a call, in bytes.
#pragma once

#include <vector>

#include "plan/model.hpp"

namespace switchyard::tool {

/// Bytes that a rank's warps read and write.
struct MemoryLoad {
  std::vector<double> read, write;  ///< [W]
};

struct CallLoads {
  explicit CallLoads(int world);

  MemoryLoad copy, sum;
  std::vector<double> quantize;           ///< [W] bytes of source rows
  std::vector<double> link_out, link_in;  ///< [W]
  std::vector<double> net_out, net_in;    ///< [W]
  std::vector<double> records;            ///< [W] that a rank's warps write
  double peers = 0;                       ///< ranks of other hosts that a rank sends to
  PlanBytes bytes(const HostsOfRanks& where) const;
};

CallLoads dispatch_loads(const PlanShape& shape, const Traffic& traffic, Variant variant);
CallLoads combine_loads(const PlanShape& shape, const Traffic& traffic, Variant variant);

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// Each rank's work in a call, in bytes.
#pragma once

#include <vector>

#include "plan/model.hpp"

namespace switchyard::tool {

/// Bytes read and written by a rank's warps.
struct MemoryLoad {
  std::vector<double> read, write;  ///< [W]
};

struct CallLoads {
  explicit CallLoads(int world);

  MemoryLoad copy, sum;
  std::vector<double> quantize;           ///< [W] bytes of source rows
  std::vector<double> link_out, link_in;  ///< [W]
  std::vector<double> net_out, net_in;    ///< [W]
  std::vector<double> records;            ///< [W] written by a rank's warps
  double peers = 0;                       ///< number of ranks on other hosts to which a rank sends
  PlanBytes bytes(const HostsOfRanks& where) const;
};

CallLoads dispatch_loads(const PlanShape& shape, const Traffic& traffic, Variant variant);
CallLoads combine_loads(const PlanShape& shape, const Traffic& traffic, Variant variant);

}  // namespace switchyard::tool

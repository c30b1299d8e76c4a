// SPDX-License-Identifier: Apache-2.0
// Whom a rank has to do with on other hosts in low-latency mode, and what goes over its rails where sizes are fixed.
#pragma once

#include <vector>

#include "bootstrap/host_map.hpp"
#include "protocol/hosts/low_latency_phases.hpp"

namespace switchyard::detail {

/// As HostMap says it; the same for all calls.
struct FarPlan {
  FarPlan(const HostMap& map, int rank);

  int own_host, own_ranks;
  std::vector<int> host_of;       ///< [W]
  std::vector<int> rail_of_host;  ///< [hosts] who stands for this rank there, as FarRails has it
  std::vector<int> proxy,
      number;                ///< [W] of ranks of other hosts: who stands for them here, and as which of whom it stands for
  std::vector<int> sources;  ///< that this rank stands for, ascending
  int most_sources = 0;      ///< of any rank
  std::vector<FarRail> rails;
};

/// FarRails::stride for rounds of all calls of a layout.
int64_t rail_bytes(const LowLatencyLayout& layout);

/// The legs of a round. `far`: where messages lie, of the rails of `plan`.
std::vector<Leg> dispatch_legs(const FarPlan& plan, const FarRails& far, const LowLatencyLayout& layout);
std::vector<Leg> combine_legs(const FarPlan& plan, const FarRails& far, const LowLatencyCombineParams& params);

}  // namespace switchyard::detail

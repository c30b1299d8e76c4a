// SPDX-License-Identifier: Apache-2.0
// The ranks of other hosts with which a rank communicates in low-latency mode, and the data transferred by its rails where
// sizes are fixed.
#pragma once

#include <vector>

#include "bootstrap/host_map.hpp"
#include "carrier/carrier.hpp"
#include "protocol/hosts/low_latency_phases.hpp"

namespace switchyard::detail {

/// Derived from HostMap; identical for all calls.
struct RemotePlan {
  RemotePlan(const HostMap& map, int rank);

  int own_host, own_ranks;
  std::vector<int> host_of;       ///< [W]
  std::vector<int> rail_of_host;  ///< [hosts] this rank's proxy there, as in RemoteRails
  std::vector<int> proxy,
      number;                ///< [W] for ranks of other hosts: their proxy here, and their index among that proxy's ranks
  std::vector<int> sources;  ///< ranks for which this rank is the proxy, ascending
  int max_sources = 0;       ///< maximum over all ranks
  std::vector<RemoteRail> rails;
};

/// RemoteRails::stride for the rounds of all calls with a layout.
int64_t rail_bytes(const LowLatencyLayout& layout);

/// The transfers of a dispatch. `remote`: the places of messages for the rails of `plan`.
std::vector<PeerTransfer> dispatch_transfers(const RemotePlan& plan, const RemoteRails& remote, const LowLatencyLayout& layout);
/// The transfers of round k of a combine. If `params.placed` is null (GPUs), does not read tables, which are in device memory.
std::vector<PeerTransfer> combine_transfers(const RemotePlan& plan, const PhasedCombineParams& params, int64_t k);

}  // namespace switchyard::detail

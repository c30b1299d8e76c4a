// SPDX-License-Identifier: Apache-2.0
// Compares the traffic of an exchange between hosts with that of an exchange that ignores hosts.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "check/scenario.hpp"

namespace switchyard::tool {

/// Traffic of one dispatch and one combine, summed over all ranks and averaged over the input sets. Zeros on one host.
struct HostTraffic {
  int hosts = 1;
  double tokens = 0;    ///< (token, other host); each crosses once
  double pairs = 0;     ///< (token, rank of another host)
  double routes = 0;    ///< to a rank of another host
  double dispatch = 0;  ///< payload bytes that the library counted
  double combine = 0;
};

/// `host_of`: host of each rank. Byte counts are left at 0.
HostTraffic crossings(const std::vector<Scenario>& scenarios, const std::vector<int>& host_of);
nlohmann::json to_json(const HostTraffic& traffic);
/// One line that compares the bytes with those of sending one row of `row_bytes` per (token, rank) and per route.
std::string hosts_line(const HostTraffic& traffic, double sent_row_bytes);

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
// What an exchange sends from host to host, beside what it would send without knowing of hosts.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "check/scenario.hpp"

namespace switchyard::tool {

/// Of one dispatch and one combine, all ranks together; means over the input sets. Zeros on one host.
struct HostTraffic {
  int hosts = 1;
  double tokens = 0;    ///< (token, other host): what crosses once each
  double pairs = 0;     ///< (token, rank of another host)
  double routes = 0;    ///< whose rank is on another host
  double dispatch = 0;  ///< payload bytes that the library counted
  double combine = 0;
};

/// `host_of`: of each rank. The bytes stay 0.
HostTraffic crossings(const std::vector<Scenario>& scenarios, const std::vector<int>& host_of);
nlohmann::json to_json(const HostTraffic& traffic);
/// One line that compares the bytes with a row of `row_bytes` per (token, rank) and per route.
std::string hosts_line(const HostTraffic& traffic, double sent_row_bytes);

}  // namespace switchyard::tool

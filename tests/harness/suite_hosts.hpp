// SPDX-License-Identifier: Apache-2.0
// Hosts of a suite's ranks, read from SWITCHYARD_HOST in the environment, in the format that groups use (GroupOptions::host).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

namespace harness {

/// Returns the host of each rank, [world]; hosts are numbered by their lowest ranks. Without the variable, all ranks are on
/// host 0.
inline std::vector<int> hosts_of_suite(int world) {
  const char* const given = std::getenv("SWITCHYARD_HOST");
  std::vector<std::string> texts(1), met;
  for (const char* at = given ? given : ""; *at != 0; ++at) {
    if (*at == ',')
      texts.emplace_back();
    else
      texts.back() += *at;
  }
  std::vector<int> host_of;
  for (int r = 0; r < world; ++r) {
    const std::string& text = texts[static_cast<size_t>(r) % texts.size()];
    const auto host = std::find(met.begin(), met.end(), text) - met.begin();
    if (host == static_cast<std::ptrdiff_t>(met.size())) met.push_back(text);
    host_of.push_back(static_cast<int>(host));
  }
  return host_of;
}
inline bool spans_hosts(int world) {
  const std::vector<int> host_of = hosts_of_suite(world);
  return std::any_of(host_of.begin(), host_of.end(), [](int host) { return host != 0; });
}

}  // namespace harness

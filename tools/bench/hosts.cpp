// SPDX-License-Identifier: Apache-2.0
#include "bench/hosts.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "cli/style.hpp"

namespace switchyard::tool {

HostTraffic crossings(const std::vector<Scenario>& scenarios, const std::vector<int>& host_of) {
  HostTraffic all;
  all.hosts = 1 + *std::max_element(host_of.begin(), host_of.end());
  const auto host = [&](int rank) { return host_of[static_cast<size_t>(rank)]; };
  for (const Scenario& s : scenarios) {
    for (int r = 0; r < s.world; ++r) {
      for (int64_t t = 0; t < s.tokens(r); ++t) {
        uint64_t ranks = 0, hosts = 0;
        for (int k = 0; k < s.topk; ++k) {
          const int32_t id = s.id(r, t, k);
          if (!s.valid(id) || host(s.owner(id)) == host(r)) continue;
          ++all.routes;
          all.pairs += (ranks >> s.owner(id) & 1) == 0;
          all.tokens += (hosts >> host(s.owner(id)) & 1) == 0;
          ranks |= uint64_t{1} << s.owner(id);
          hosts |= uint64_t{1} << host(s.owner(id));
        }
      }
    }
  }
  for (double* count : {&all.tokens, &all.pairs, &all.routes}) *count /= static_cast<double>(scenarios.size());
  return all;
}

nlohmann::json to_json(const HostTraffic& t) {
  return {{"hosts", t.hosts},   {"token_host_pairs", t.tokens}, {"token_rank_pairs", t.pairs},
          {"routes", t.routes}, {"dispatch_bytes", t.dispatch}, {"combine_bytes", t.combine}};
}

std::string hosts_line(const HostTraffic& t, double sent_row_bytes) {
  return fmt::format(
      "{} hosts: {} cross in a dispatch, {} in a combine; a row per (token, rank) would be {} each, a row per route {}", t.hosts,
      decimal_size(t.dispatch), decimal_size(t.combine), decimal_size(t.pairs * sent_row_bytes),
      decimal_size(t.routes * sent_row_bytes));
}

}  // namespace switchyard::tool

// SPDX-License-Identifier: Apache-2.0
#include "plan/hosts.hpp"

namespace switchyard::detail {

void ReturnCountsMemory::resize(int64_t n) {
  of_token.resize(static_cast<size_t>(n));
  before_group.resize(static_cast<size_t>(ReturnCounts::groups(n)));
}

CrossedTables CrossedTokens::view() {
  return {token.data(), ids.data(),     route_row.data(), sends.data(), weights.empty() ? nullptr : weights.data(),
          stride,       returned.view()};
}

void list_leaving(const LocalPlan& local, std::span<const int> host_of, int own_host, int hosts,
                  std::vector<std::vector<int32_t>>& leaving) {
  leaving.resize(static_cast<size_t>(hosts));
  for (auto& tokens : leaving) tokens.clear();
  for (int64_t t = 0; t < local.tokens; ++t) {
    for (int64_t f = t * local.topk; f < (t + 1) * local.topk; ++f) {
      const int32_t id = local.ids[static_cast<size_t>(f)];
      if (id < 0) continue;
      const int host = host_of[static_cast<size_t>(local.map.owner(id))];
      auto& tokens = leaving[static_cast<size_t>(host)];
      if (host != own_host && (tokens.empty() || tokens.back() != t)) tokens.push_back(static_cast<int32_t>(t));
    }
  }
}

}  // namespace switchyard::detail

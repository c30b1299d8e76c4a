// SPDX-License-Identifier: Apache-2.0
#include "plan/hosts.hpp"

#include <algorithm>

namespace switchyard::detail {

int64_t CrossedTokens::first_from(int64_t t) const { return std::lower_bound(token.begin(), token.end(), t) - token.begin(); }

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

int count_returned_rows(const BackTables& token, ReturnKind rows, int topk, const ExpertMap& map, std::span<const int> host_of,
                        int host) {
  int kept = 0;
  if (rows == ReturnKind::per_route) {
    for (int k = 0; k < topk; ++k)
      kept += token.route_row[k] >= 0 && host_of[static_cast<size_t>(map.owner(token.ids[k]))] == host ? 1 : 0;
    return kept;
  }
  for (int i = 0; i < token.places; ++i) {
    const SendEntry& e = token.entries[i];
    kept += e.rank >= 0 && e.row >= 0 && host_of[static_cast<size_t>(e.rank)] == host ? 1 : 0;
  }
  return rows == ReturnKind::per_host ? std::min(kept, 1) : kept;
}

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// What crosses between hosts, as both ends know it. Rows and records lie where the plan of all ranks has them; these tables
// only say which tokens pass through whom.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.hpp"

namespace switchyard::detail {

/// Tokens of another host's rank `source` that touch this host, as the rank knows them that stands for it here. They have
/// numbers of their own, in the order of the source's tokens; the tables are those of an owner, by these numbers.
struct CrossedTokens {
  int source = -1;
  int64_t count = 0;
  int stride = 1;                  ///< places of a token in `sends`: as many ranks of this host as it can touch
  std::vector<int32_t> token;      ///< [count] ascending
  std::vector<int32_t> ids;        ///< [count * K]
  std::vector<int32_t> route_row;  ///< [count * K] expert-major
  std::vector<SendEntry> sends;    ///< [count * stride] ranks of this host
  std::vector<float> weights;      ///< [count * K], or empty

  /// First number whose token is at least `t`.
  int64_t first_from(int64_t t) const;
};

/// The part of a handle for groups of several hosts. `crossed` is complete once the dispatch has returned.
struct HostTables {
  std::vector<int> host_of;                   ///< [W] of the group that dispatched
  std::vector<std::vector<int32_t>> leaving;  ///< [hosts] this rank's tokens that touch each other host, ascending
  std::vector<CrossedTokens> crossed;         ///< of each rank that this one stands for, ascending
};

/// `leaving` of the tokens of `local`. They are counted before any capacity, because the counts travel first. `host_of`: [W].
void list_leaving(const LocalPlan& local, std::span<const int> host_of, int own_host, int hosts,
                  std::vector<std::vector<int32_t>>& leaving);

/// Rows that come back for one token, out of a host.
enum class RowsBack : uint8_t {
  per_rank,   ///< one of each rank there that keeps a row of it
  per_route,  ///< one of each route that is kept there
  per_host,   ///< one, if any is kept there
};
/// For a token whose tables are `tables` at number `t`: rows that come back from `host`.
struct BackTables {
  const SendEntry* entries = nullptr;  ///< of token t: places
  int places = 0;
  const int32_t* ids = nullptr;        ///< [K] of token t
  const int32_t* route_row = nullptr;  ///< [K] of token t
};
int rows_back(const BackTables& token, RowsBack rows, int topk, const ExpertMap& map, std::span<const int> host_of, int host);

}  // namespace switchyard::detail

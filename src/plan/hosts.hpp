// SPDX-License-Identifier: Apache-2.0
// Traffic between hosts, as known at both ends. The positions of rows and records are determined by the plan of all ranks;
// these tables only list which tokens pass through which rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.hpp"

namespace switchyard::detail {

/// Tokens from rank `source` on another host that go to this host, as held by the source's proxy here. They are numbered
/// separately, in the order of the source's tokens. The tables are like those of an owner, but indexed by these numbers.
struct CrossedTokens {
  int source = -1;
  int64_t count = 0;
  int stride = 1;                  ///< places per token in `sends`: number of ranks on this host that it can go to
  std::vector<int32_t> token;      ///< [count] ascending
  std::vector<int32_t> ids;        ///< [count * K]
  std::vector<int32_t> route_row;  ///< [count * K] expert-major
  std::vector<SendEntry> sends;    ///< [count * stride] ranks on this host
  std::vector<float> weights;      ///< [count * K], or empty

  /// The first number whose token is at least `t`.
  int64_t first_from(int64_t t) const;
};

/// The part of a handle that is needed for groups on several hosts. `crossed` is complete once the dispatch has returned.
struct HostTables {
  std::vector<int> host_of;                   ///< [W] of the dispatching group
  std::vector<std::vector<int32_t>> leaving;  ///< [hosts] this rank's tokens that go to each other host, ascending
  std::vector<CrossedTokens> crossed;         ///< for each rank whose proxy this rank is, ascending
};

/// Fills `leaving` for the tokens in `local`, ignoring capacities, because the counts are sent first. `host_of`: [W].
void list_leaving(const LocalPlan& local, std::span<const int> host_of, int own_host, int hosts,
                  std::vector<std::vector<int32_t>>& leaving);

/// The rows that a host returns for a token.
enum class ReturnKind : uint8_t {
  per_rank,   ///< one per rank there that keeps a row of it
  per_route,  ///< one per kept route there
  per_host,   ///< one, if any is kept there
};
/// Table entries of token t, from which the rows that a host returns for it are counted.
struct BackTables {
  const SendEntry* entries = nullptr;  ///< of token t: places
  int places = 0;
  const int32_t* ids = nullptr;        ///< [K] of token t
  const int32_t* route_row = nullptr;  ///< [K] of token t
};
int count_returned_rows(const BackTables& token, ReturnKind rows, int topk, const ExpertMap& map, std::span<const int> host_of,
                        int host);

}  // namespace switchyard::detail

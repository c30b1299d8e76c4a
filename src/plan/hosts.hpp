// SPDX-License-Identifier: Apache-2.0
// Traffic between hosts, as known at both ends. The positions of rows and records are determined by the plan of all ranks;
// these tables only list which tokens pass through which rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.hpp"

namespace switchyard::detail {

/// The rows that a host returns for a token.
enum class ReturnKind : uint8_t {
  per_rank,   ///< one per rank there that keeps a row of it
  per_route,  ///< one per kept route there (expert-major)
  per_host,   ///< one, if any is kept there
};
inline constexpr int kReturnKinds = 3;

/// Number of rows that the host with `ranks` (a bit mask) returns for a token, a byte for each ReturnKind. `entries`, `ids` and
/// `route_row`: of the token; `route_row` is null if rows are rank-major.
SWITCHYARD_FN inline uint32_t returned_rows(const SendEntry* entries, int places, const int32_t* ids, const int32_t* route_row,
                                            int topk, const ExpertRanges& map, uint64_t ranks) {
  uint32_t by_rank = 0, by_route = 0;
  for (int i = 0; i < places; ++i)
    by_rank += entries[i].rank >= 0 && entries[i].row >= 0 && (ranks >> entries[i].rank & 1) != 0 ? 1 : 0;
  for (int k = 0; route_row != nullptr && k < topk; ++k)
    by_route += route_row[k] >= 0 && (ranks >> map.owner(ids[k]) & 1) != 0 ? 1 : 0;
  return by_rank | by_route << 8 | (by_rank > 0 ? 1u : 0u) << 16;
}

/// Numbers of rows that a host returns for a sequence of `n` tokens. Both ends of a rail compute the same values for the tokens
/// that cross it.
struct ReturnCounts {
  static constexpr int64_t kGroup = 16;  ///< tokens per entry of `before_group`
  struct Rows {
    int32_t of[kReturnKinds];
  };
  uint32_t* of_token = nullptr;  ///< [n] returned_rows()
  Rows* before_group = nullptr;  ///< [groups(n)] rows of all tokens before the group

  static SWITCHYARD_FN constexpr int64_t groups(int64_t n) { return n / kGroup + 1; }
  SWITCHYARD_FN int64_t of(ReturnKind kind, int64_t i) const { return of_token[i] >> (8 * static_cast<int>(kind)) & 0xff; }
  /// Number of rows of the tokens before token i, i in [0, n].
  SWITCHYARD_FN int64_t before(ReturnKind kind, int64_t i) const {
    int64_t rows = before_group[i / kGroup].of[static_cast<int>(kind)];
    for (int64_t j = i / kGroup * kGroup; j < i; ++j) rows += of(kind, j);
    return rows;
  }
};
/// Memory for ReturnCounts on the host.
struct ReturnCountsMemory {
  std::vector<uint32_t> of_token;
  std::vector<ReturnCounts::Rows> before_group;

  void resize(int64_t n);
  ReturnCounts view() { return {of_token.data(), before_group.data()}; }
};

/// Tokens from a rank on another host that go to this host, as held by the rank's proxy here. They are numbered separately, in
/// the order of the source's tokens. The tables are like those of an owner, but indexed by these numbers.
struct CrossedTables {
  int32_t* token = nullptr;      ///< [count] ascending
  int32_t* ids = nullptr;        ///< [count * K]
  int32_t* route_row = nullptr;  ///< [count * K] expert-major
  SendEntry* sends = nullptr;    ///< [count * stride] ranks on this host
  float* weights = nullptr;      ///< [count * K], or null
  int stride = 1;                ///< places per token in `sends`: number of ranks on this host that it can go to
  ReturnCounts returned;         ///< rows of this host, by number

  /// The first of `count` numbers whose token is at least `t`.
  SWITCHYARD_FN int64_t first_from(int64_t t, int64_t count) const {
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t mid = low + (high - low) / 2;
      if (token[mid] < t)
        low = mid + 1;
      else
        high = mid;
    }
    return low;
  }
};

/// CrossedTables of rank `source` on the host.
struct CrossedTokens {
  int source = -1;
  int64_t count = 0;
  int stride = 1;
  std::vector<int32_t> token;
  std::vector<int32_t> ids;
  std::vector<int32_t> route_row;
  std::vector<SendEntry> sends;
  std::vector<float> weights;
  ReturnCountsMemory returned;

  CrossedTables view();
};

/// The part of a handle that is needed for groups on several hosts. `crossed` is complete once the dispatch has returned.
struct HostTables {
  std::vector<int> host_of;                   ///< [W] of the dispatching group
  std::vector<std::vector<int32_t>> leaving;  ///< [hosts] this rank's tokens that go to each other host, ascending
  std::vector<ReturnCountsMemory> returned;   ///< [hosts] rows that each other host returns, by token of this rank
  std::vector<CrossedTokens> crossed;         ///< for each rank whose proxy this rank is, ascending
};

/// Fills `leaving` for the tokens in `local`, ignoring capacities, because the counts are sent first. `host_of`: [W].
void list_leaving(const LocalPlan& local, std::span<const int> host_of, int own_host, int hosts,
                  std::vector<std::vector<int32_t>>& leaving);

}  // namespace switchyard::detail

// SPDX-License-Identifier: Apache-2.0
// Other views of the plan, as defined by the reference systems: DeepEP matrices and the route ledger.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/routing.hpp"

namespace oracle {

/// Fields of DispatchMatrices for one rank.
struct Matrices {
  std::vector<int32_t> rank_prefix, channel_prefix, recv_channel_prefix, recv_src_idx, send_head;
  std::vector<uint8_t> is_token_in_rank;
};
/// Pairs whose routes were all dropped at capacity are not sent.
Matrices matrices(const Problem& problem, const Expected& expected, int rank, int num_channels);

/// Fields of RoutingLayout for one rank.
struct RoutingCounts {
  std::vector<int32_t> tokens_per_rank, tokens_per_expert;
  std::vector<uint8_t> is_token_in_rank;
};
RoutingCounts routing_counts(const Problem& problem, int rank);

/// Fields of LedgerTables for one rank.
struct Ledger {
  int padded = 0;
  std::vector<int32_t> peer_token_per_expert, expanded_row_idx, cumsum_per_expert, dispatch_offset, prev_sum_before_rank;
};
Ledger ledger(const Problem& problem, int rank);

}  // namespace oracle

// SPDX-License-Identifier: Apache-2.0
/// \file
/// The plan of a dispatch in the formats of other systems: tables created by Handle::matrices() and Handle::ledger().
///
/// Notation: W ranks, T tokens on this rank, K topk, E experts, M received rows, C channels.
#pragma once

#include <cstdint>
#include <vector>

namespace switchyard {

/// DeepEP / TileScale description of a dispatch: int32, dense and row-major. Prefixes are inclusive unless noted.
struct DispatchMatrices {
  int world = 0, num_channels = 0;
  std::vector<int32_t> rank_prefix_matrix;          ///< [W, W] tokens of sources 0..i to rank j
  std::vector<int32_t> channel_prefix_matrix;       ///< [W, C] this rank's tokens to rank d in channels 0..c
  std::vector<int32_t> recv_channel_prefix_matrix;  ///< [W, C] exclusive: first row of channel c among source s's rows here
  std::vector<int32_t> recv_src_idx;                ///< [M] token index at the source
  std::vector<uint8_t> is_token_in_rank;            ///< [T, W]
  std::vector<int32_t> send_head;  ///< [T, W] index of token t in the stream (channel of t, rank), -1 if not sent
};

/// The explicit route ledger (PTO moe_combine's fields, order and padding).
struct LedgerTables {
  int world = 0, num_experts = 0, num_experts_padded = 0, num_local_experts = 0;
  std::vector<int32_t> peer_token_per_expert;  ///< [W, Ep] rows of source s for global expert e; Ep = E rounded up to 16
  std::vector<int32_t> expanded_row_idx;       ///< [T * K] row of route f in this rank's return buffer, -1 invalid
  std::vector<int32_t> cumsum_per_expert;      ///< [W, Ep] inclusive prefix over experts
  std::vector<int32_t> dispatch_offset;        ///< [num_local_experts] first row of each local expert
  std::vector<int32_t> prev_sum_before_rank;   ///< [W, num_local_experts] rows of sources before s inside local expert
};

}  // namespace switchyard

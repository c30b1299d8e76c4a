// SPDX-License-Identifier: Apache-2.0
#include "plan/index.hpp"
#include "plan/ledger_work.hpp"

#include <algorithm>

#include "switchyard/plan_tables.hpp"

namespace switchyard::detail {

namespace {

int64_t rows_per_chunk(int64_t row_bytes, int64_t chunk_bytes) { return std::max<int64_t>(1, chunk_bytes / row_bytes); }

/// The rank that returns each row, and the ranks that return rows for each token.
void find_senders(const LedgerTables& t, const ExpertRanges& map, int topk, int rank, LedgerWork& work) {
  const int64_t first = int64_t{rank} * t.num_experts_padded;
  for (int expert = 0; expert < t.num_experts; ++expert)
    work.sender_of.resize(idx(t.cumsum_per_expert[idx(first + expert)]), static_cast<uint8_t>(map.owner(expert)));
  work.senders_of.assign(t.expanded_row_idx.size() / idx(topk), 0);
  for (size_t f = 0; f < t.expanded_row_idx.size(); ++f) {
    const int32_t row = t.expanded_row_idx[f];
    if (row >= 0) work.senders_of[f / idx(topk)] |= uint64_t{1} << work.sender_of[idx(row)];
  }
}

}  // namespace

LedgerWork make_ledger_work(const LedgerTables& t, int topk, int64_t row_bytes, int rank, int64_t chunk_bytes) {
  const ExpertRanges map{t.num_experts, t.world};
  const int64_t per_chunk = rows_per_chunk(row_bytes, chunk_bytes);
  LedgerWork work;
  work.chunks_of.assign(idx(t.world), 0);
  for (int step = 1; step <= t.world; ++step) {
    const int owner = (rank + step) % t.world;
    for (int el = 0; el < t.num_local_experts; ++el) {
      const int64_t column = int64_t{owner} * t.num_experts_padded + map.first(rank) + el;
      const int64_t rows = t.peer_token_per_expert[idx(column)];
      const int64_t from =
          int64_t{t.dispatch_offset[idx(el)]} + t.prev_sum_before_rank[idx(int64_t{owner} * t.num_local_experts + el)];
      const int64_t to = t.cumsum_per_expert[idx(column)] - rows;
      if (rows > 0) work.rows = std::max(work.rows, from + rows);
      for (int64_t at = 0; at < rows; at += per_chunk) {
        work.chunks.push_back({owner, static_cast<int32_t>(std::min(per_chunk, rows - at)), static_cast<int32_t>(from + at),
                               static_cast<int32_t>(to + at)});
        ++work.chunks_of[idx(owner)];
      }
    }
  }
  work.returned = t.cumsum_per_expert[idx(int64_t{rank} * t.num_experts_padded + t.num_experts_padded - 1)];
  find_senders(t, map, topk, rank, work);
  return work;
}

int64_t max_ledger_chunks(int64_t routes, int world, int num_local_experts, int64_t row_bytes, int64_t chunk_bytes) {
  return routes / rows_per_chunk(row_bytes, chunk_bytes) + int64_t{world} * num_local_experts;
}

}  // namespace switchyard::detail
